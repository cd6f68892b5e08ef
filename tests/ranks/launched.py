"""A user's script, for tests of launchers: two Trainers, one after the other."""

import pickle
import sys

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_pipeline import PipelineStrategy
from tests.ranks.lightning_cases import Regression, loader


class UsesTheGroup(Regression):
    def on_train_end(self) -> None:
        dist.barrier()


def main(devices: int, num_nodes: int, stages: int) -> None:
    for run in range(2):
        trainer = pl.Trainer(
            accelerator="cpu", devices=devices, num_nodes=num_nodes, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            strategy=PipelineStrategy(stages, num_microbatches=2),
        )  # fmt: skip
        module = UsesTheGroup()
        trainer.fit(module, loader(), loader(seed=4))
        total = sum(float(parameter.detach().abs().sum()) for parameter in module.parameters())
        stage = trainer.strategy.stage_index()
        assert pickle.loads(pickle.dumps(trainer)).current_epoch == 1  # without the processes
        print(f"run {run} rank {trainer.global_rank} stage {stage} total {total:.6f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
