"""What an import of the package brings with it, and when Lightning knows the strategy."""

import subprocess
import sys

import pytest

BEFORE = """
import lightning_pipeline, sys
assert not {"torch", "lightning"} & set(sys.modules)
import lightning_pipeline.schedules
assert not {"torch", "lightning"} & set(sys.modules)
import lightning.pytorch as pl
pl.strategies.StrategyRegistry["pipeline"]
import pickle
strategy = pickle.loads(pickle.dumps(lightning_pipeline.PipelineStrategy(2)))
assert repr(strategy).startswith("PipelineStrategy(stages=2")
"""
AFTER = """
import lightning_pipeline.strategy
import lightning
from lightning.pytorch.cli import LightningArgumentParser
parser = LightningArgumentParser()
parser.add_class_arguments(lightning.Trainer, "trainer")
name = "--trainer.strategy"
given = [f"{name}=PipelineStrategy", f"{name}.stages=2", f"{name}.schedule=GPipe", "--trainer.devices=2"]
made = parser.instantiate_classes(parser.parse_args([*given, "--trainer.accelerator=cpu"]))
assert type(made.trainer.strategy) is lightning_pipeline.PipelineStrategy
assert lightning.pytorch.strategies.StrategyRegistry["pipeline"]
"""
HELP = """
import sys
from lightning_pipeline.__main__ import main
for option in ("--help", "--version"):
    try:
        main([option])
    except SystemExit as end:
        assert end.code == 0
assert not {"torch", "lightning", "jsonargparse"} & set(sys.modules)
"""


@pytest.mark.parametrize("program", [BEFORE, AFTER, HELP], ids=["package first", "strategy first", "help"])
def test_in_a_fresh_process(program: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=100)
