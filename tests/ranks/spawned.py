"""A user's script whose further processes are started anew by `multiprocessing`, with its objects pickled."""

import lightning.pytorch as pl

from lightning_pipeline import PipelineStrategy
from tests.ranks.lightning_cases import Regression, loader


def main() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, strategy=PipelineStrategy(2, num_microbatches=2, start_method="spawn"),
    )  # fmt: skip
    module = Regression()
    trainer.fit(module, loader(), loader(seed=4))
    total = sum(float(parameter.detach().abs().sum()) for parameter in module.parameters())
    print(f"total {total:.6f} val_loss {float(trainer.callback_metrics['val_loss']):.6f}", flush=True)


if __name__ == "__main__":
    main()
