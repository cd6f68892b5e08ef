"""The small GPT from LightningCLI: `python examples/gpt_cli.py fit --config examples/gpt.yaml`.

`--trainer.strategy.stages=4 --trainer.devices=4` on the command line changes what the file says.
"""

from gpt import GPT, StandardLibrary
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(GPT, StandardLibrary, seed_everything_default=1)
