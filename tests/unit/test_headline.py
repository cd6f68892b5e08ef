"""What a run says of itself is grammar, and true on a busy machine too."""

from lightning_pipeline.recording import Event
from lightning_pipeline.run.setup import headline, too_small
from lightning_pipeline.schedules import Action, OneFOneB, get_schedule


def said(ranks: int, microbatches: int, asked: int | None = 1) -> str:
    plan = get_schedule("1F1B").plan(ranks, microbatches)
    return headline(plan, OneFOneB(), batch_size=32, replicas=1, asked=asked, trains=True)


def test_one_stage_is_no_pipeline_whose_ranks_could_be_miscounted() -> None:
    one = "1F1B: 1 micro-batch of a batch of 32, 1 stage on 1 rank x 1 replica; at equal stages 0% of the time is idle"
    assert said(1, 1) == one
    assert said(2, 8).startswith("1F1B: 8 micro-batches of a batch of 32, 2 stages on 2 ranks x 1 replica; ")
    assert "divide batches and scale learning rates by strategy.num_replicas" in said(2, 8)


def test_more_micro_batches_than_samples_are_not_promised() -> None:
    few = said(2, 32, asked=64)
    assert "32 micro-batches of a batch of 32, which is not enough for num_microbatches=64, 2 stages" in few
    assert "not enough" not in said(2, 32, asked=32)
    assert "32 micro-batches (num_microbatches='auto') of a batch of 32, 2 stages" in said(2, 32, asked=None)


def forward(stage: int, microbatch: int, milliseconds: float) -> Event:
    return Event(Action(stage, "F", microbatch), 0, 0, int(1e6 * milliseconds))


def test_a_small_model_is_told_so_though_other_work_disturbs_most_of_its_actions() -> None:
    busy = [forward(0, 0, 30.0), forward(0, 1, 0.5), forward(0, 2, 12.0)]
    assert "takes 0.5 ms here" in (too_small(busy) or "")
    assert too_small([*busy, forward(2, 0, 5.0), forward(2, 1, 9.0)]) is None, "one of its stages is large"
    assert too_small([]) is None
