"""How Lightning calls `configure_model`, and what it expects of a checkpoint."""

from typing import Any

import lightning
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


def checkpoint_without_state() -> dict[str, Any]:
    """What `_CheckpointConnector` takes for a checkpoint from which nothing but weights was restored.

    Without `lr_schedulers` and `optimizer_states` it raises in `fit`; `_pl_migrate_checkpoint` asks for a
    version.
    """
    return {
        "pytorch-lightning_version": lightning.__version__, "state_dict": {}, "lr_schedulers": [],
        "optimizer_states": [],
    }  # fmt: skip
