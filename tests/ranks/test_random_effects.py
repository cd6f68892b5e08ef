"""What random steps and hooks leave behind. `benchmarks/random_effects.py` runs more of them."""

from collections.abc import Callable

from tests.effect_programs import Program, Statement, outcomes_of, random_effects, run_whole
from tests.pool import Pool
from tests.whole import chosen

Ranks = Callable[[int], Pool]


def test_random_effects_are_those_of_one_device(ranks: Ranks) -> None:
    seeds = chosen((0, 3, 5, 6, 9, 10, 14, 15, 16, 87, 117), 0, 3, 6, 9, 10)
    programs = [random_effects(seed) for seed in seeds]
    assert outcomes_of(programs, ranks(2)) == ["equal"] * len(programs)


def test_random_effects_of_steps_that_run_whole_are_those_of_one_device(ranks: Ranks) -> None:
    """One of them freezes weights between the forward and the backward."""
    programs = [run_whole(random_effects(seed, arrays=seed % 2 == 1)) for seed in chosen(range(30, 40), 6, 7)]
    assert outcomes_of(programs, ranks(2)) == ["equal"] * len(programs)


def test_a_place_that_a_later_batch_changes_further_down_is_that_of_one_device(ranks: Ranks) -> None:
    """A list that each batch cuts first, and that one batch adds to after the units."""
    cut = Statement("before", "always", "keep three", "samples", 9)
    added = Statement("after", "batch_idx", "append", "batch mean", 5)
    pipelines = [{"stages": 2, "num_microbatches": number} for number in (1, 2)]
    programs = [Program((added, cut), pipeline, 4, False) for pipeline in pipelines]
    alone, several = outcomes_of(programs, ranks(2))
    assert alone == "equal"
    assert several.startswith(("equal", "refused"))


def test_how_much_a_hook_has_put_into_a_list_decides(ranks: Ranks) -> None:
    """What the step counts then begins in the second batch, in which all else is as in the first."""
    more = Statement("batch start", "always", "append", "batch sum", 1)
    counts = [
        Statement("between", "list", effect, "hidden mean", 7)
        for effect in ("closure", "class", "entry add", "object")
    ]
    pipeline = {"stages": 2, "num_microbatches": 2}
    programs = [Program((more, one), pipeline, 3, False) for one in counts]
    assert outcomes_of(programs, ranks(2)) == ["equal"] * len(programs)


def test_a_number_in_a_text_decides(ranks: Ranks) -> None:
    text = Statement("before", "text", "append", "batch mean", 5)
    program = Program((text,), {"stages": 2, "num_microbatches": 2}, 4, False)
    assert outcomes_of([program], ranks(2)) == ["equal"]


def test_a_condition_on_the_batch_is_decided_once_for_all_micro_batches(ranks: Ranks) -> None:
    scaled = Statement("between", "first sample", "use number", "batch largest", 9)
    more = Statement("batch start", "always", "multiply", "one", 0)
    program = Program((more, scaled), {"stages": 2, "num_microbatches": 4}, 4, False)
    (end,) = outcomes_of([program], ranks(2))
    assert end == "equal"


def test_layers_that_a_step_freezes_get_no_gradients_from_a_split_backward(ranks: Ranks) -> None:
    """The backward of the batch that freezes them adds nothing: autograd asks when it comes to the weight."""
    frozen = Statement("late", "table", "freeze", "batch mean", 1)
    pipelines = [{"stages": 2, "num_microbatches": 2, "schedule": schedule} for schedule in ("ZBH1", "1F1B")]
    programs = [Program((frozen,), pipeline, 3, False) for pipeline in pipelines]
    assert outcomes_of(programs, ranks(2)) == ["equal", "equal"]


def test_layers_that_a_step_freezes_get_no_gradients_with_several_stages_on_a_rank(ranks: Ranks) -> None:
    """A replay of the rank's other stage runs between a forward and its backward, and begins unfrozen."""
    frozen = Statement("after", "last batch", "freeze", "batch sum", 1)
    pipeline = {"stages": 2, "num_microbatches": 4, "schedule": "Interleaved1F1B", "stages_per_rank": 2}
    assert outcomes_of([Program((frozen,), pipeline, 3, False)], ranks(2)) == ["equal"]


def test_an_attribute_that_becomes_a_tensor_and_is_then_written_in_place_is_that_of_one_device(
    ranks: Ranks,
) -> None:
    times = Statement("after", "odd batch", "multiply", "batch column", 3)
    more = Statement("after", "seeded", "add", "batch sum", 1)
    pipeline = {"stages": 2, "num_microbatches": 4, "schedule": "ZBH1"}
    assert outcomes_of([Program((times, more), pipeline, 3, False)], ranks(2)) == ["equal"]


def test_a_number_of_the_batch_that_is_as_large_as_a_micro_batch_is_no_count_of_samples(ranks: Ranks) -> None:
    """The third batch has number 2, and micro-batches two samples."""
    added = Statement("before", "last batch", "rebind", "index", 9)
    pipeline = {"stages": 2, "num_microbatches": 4}
    assert outcomes_of([Program((added,), pipeline, 3, False)], ranks(2)) == ["equal"]


def test_a_condition_on_the_batch_decides_an_effect_once(ranks: Ranks) -> None:
    programs = [
        Program(
            (Statement(place, "data", effect, "samples", 3),), {"stages": 2, "num_microbatches": 4}, 4, True
        )
        for place, effect in (("before", "unit attribute"), ("validation", "append"), ("late", "layer eval"))
    ]
    assert outcomes_of(programs, ranks(2)) == ["equal"] * 3


def test_a_list_that_becomes_a_number_between_batches_is_looked_at(ranks: Ranks) -> None:
    assert outcomes_of([random_effects(451)], ranks(2)) == ["equal"]


def test_what_the_first_batches_leave_as_it_was_is_tried_out_later(ranks: Ranks) -> None:
    """A list is added to and emptied in some batches; a number goes on where the batch says so."""
    added = Statement("before", "data", "append", "batch sum", 0)
    emptied = Statement("after", "text", "pop", "batch largest", 0)
    more = Statement("validation", "data", "add", "loss item", 5)
    several = [{"stages": 2, "num_microbatches": 2, "schedule": "ZBH1"}, {"stages": 2, "num_microbatches": 4}]
    programs = [Program((added, emptied), several[0], 4, False), Program((more,), several[1], 3, False)]
    assert outcomes_of(programs, ranks(2)) == ["equal"] * 2


def test_a_number_of_a_class_that_a_later_batch_changes_is_warned_of(ranks: Ranks) -> None:
    """No run of the step without values changes it, as the batch that does so decides by what units give."""
    (end,) = outcomes_of([random_effects(589)], ranks(2))
    assert end.startswith("warned: training_step has changed 'Made.total' on the last stage alone")
