"""How Lightning calls `configure_model`."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer import call


def configure_again(module: LightningModule) -> None:
    """Call `configure_model` as `trainer/call.py:_call_configure_model` does, inside `tensor_init_context`.

    Lightning leaves `_current_fx_name` set when a hook raises; all of them are private since 2.0.
    """
    trainer: Any = module.trainer
    module._current_fx_name = None
    with trainer.strategy.model_sharded_context(), trainer.precision_plugin.module_init_context():
        call._call_lightning_module_hook(trainer, "configure_model")
