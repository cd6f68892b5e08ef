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
assert repr(strategy).startswith("<PipelineStrategy(stages=2")
"""
AFTER = """
import lightning
import lightning_pipeline
from lightning.pytorch.cli import LightningArgumentParser
parser = LightningArgumentParser()
parser.add_class_arguments(lightning.Trainer, "trainer")
given = ["--trainer.strategy=PipelineStrategy", "--trainer.strategy.stages=2", "--trainer.strategy.schedule=GPipe"]
made = parser.instantiate_classes(parser.parse_args([*given, "--trainer.devices=2", "--trainer.accelerator=cpu"]))
assert type(made.trainer.strategy) is lightning_pipeline.PipelineStrategy
assert lightning.pytorch.strategies.StrategyRegistry["pipeline"]
"""


@pytest.mark.parametrize("program", [BEFORE, AFTER], ids=["before Lightning", "after Lightning"])
def test_in_a_fresh_process(program: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=100)
