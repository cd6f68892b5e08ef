"""Which tests `make test` leaves to `make test-rest`, so that it ends in ten minutes; `make test-whole` runs all.

Of a test with rows, in the folders of `ONE_ROW`, `make test` runs the last row: the one that was added last, of most
stages and micro-batches where a matrix goes upwards. `LATER` names tests that take a worker more than some six seconds
and have quicker ones beside them. What CI runs leaves out neither.
"""

import os
from collections.abc import Sequence
from typing import Any

import pytest

WHOLE = os.environ.get("WHOLE") == "1"  # set by `make test-rest` and `make test-whole`
ONE_ROW = (
    "tests/faults/",
    "tests/ranks/",
    "tests/unit/construction/",
    "tests/unit/split/",
    "tests/unit/test_one_device.py",
    "tests/unit/test_random_losses.py",
)
LATER = frozenset(
    f"tests/{test}"
    for test in (
        "faults/test_matrix.py::test_a_metric_that_one_rank_asks_for_alone_is_named",
        "faults/test_matrix.py::test_a_rank_that_is_killed_in_its_last_hook_is_named",
        "faults/test_resume.py::test_a_chain_of_resumed_runs_is_the_uninterrupted_run",
        "faults/test_resume.py::test_torchrun_starts_a_job_again_that_goes_on_by_itself",
        "ranks/test_checkpoint_resume.py::test_hops_between_layouts_keep_every_bit",
        "ranks/test_documentation.py::test_a_script_trains_and_prints_what_its_page_says",
        "ranks/test_documentation.py::test_the_blocks_of_a_page_that_belong_together_run",
        "ranks/test_growth.py::test_a_module_that_changes_in_a_run_is_what_it_is_on_one_device",
        "ranks/test_growth.py::test_a_run_that_grew_goes_on_from_its_checkpoint",
        "ranks/test_late_effects.py::test_what_depends_on_numbers_that_change_is_left_once_on_every_rank",
        "ranks/test_late_effects.py::test_what_later_batches_write_in_place_is_written_once",
        "ranks/test_lightning_batches.py::test_packed_texts_of_other_lengths_train_as_on_one_device",
        "ranks/test_lightning_launch.py::test_a_script_spawns_its_ranks",
        "ranks/test_lightning_launch.py::test_two_trainers_in_one_script",
        "ranks/test_metrics_in_a_step.py::test_metrics_are_given_the_numbers_of_the_batch",
        "ranks/test_mixed_samples.py::test_ranks_have_their_samples_of_what_one_device_mixes",
        "ranks/test_random_effects.py::test_a_condition_on_the_batch_decides_an_effect_once",
        "ranks/test_random_effects.py::test_what_the_first_batches_leave_as_it_was_is_tried_out_later",
        "ranks/test_sizes_by_values.py::test_every_rank_has_what_a_step_counts",
        "ranks/test_staged.py::test_no_phase_takes_more_than_a_share_and_a_tensor",
        "ranks/test_steps_by_message.py::test_tokens_are_generated_in_a_step",
        "ranks/test_trainer_properties.py::test_attributes_are_those_of_one_device",
        "ranks/test_whole_trainer.py::test_metrics_of_replicas_are_read_by_a_bar_on_one_rank",
        "unit/planning/test_command.py::test_stages_are_measured_with_weights",
        "unit/planning/test_link.py::test_the_reason_of_a_process_that_has_torch_is_told",
        "unit/split/test_dictionaries_in_steps.py::test_every_rank_has_it_at_the_epochs_end",
        "unit/split/test_inference_mode.py::test_no_step_of_a_pipeline_runs_in_inference_mode",
        "unit/split/test_loops_over_words.py::test_each_length_goes_its_own_way",
        "unit/split/test_loops_over_words.py::test_ranks_go_the_same_way",
        "unit/split/test_losses_by_sample.py::test_a_loss_in_a_loop_over_samples_is_one_devices",
        "unit/split/test_rules_states.py::test_caches_filled_in_a_unit_hold_no_placeholder_after_the_trace",
        "unit/test_imports.py::test_in_a_fresh_process",
        "unit/test_random_losses.py::test_what_is_logged_is_the_number_of_the_batch",
    )
)


def chosen(rows: Sequence[Any], *daily: int) -> Sequence[Any]:
    """All of them in the whole run, else those at these positions."""
    return rows if WHOLE else [rows[position] for position in daily]


def mark(items: Sequence[pytest.Item], only_some: bool) -> None:
    """Mark what `make test` leaves out, among what was collected.

    Args:
        items: What was collected.
        only_some: Whether tests were named on the command line, so that others of their files are missing.

    Raises:
        pytest.UsageError: `LATER` names a test that is none.
    """
    last = {_test_of(item): item for item in items if not item.get_closest_marker("whole")}
    names = {_test_of(item) for item in items}
    files = {name.partition("::")[0] for name in names}
    missing = {test for test in LATER if test.partition("::")[0] in files} - names
    if missing and not only_some:
        raise pytest.UsageError(f"tests/whole.py names tests that are none: {sorted(missing)}")
    for item in items:
        test = _test_of(item)
        if test in LATER or (test.startswith(ONE_ROW) and last.get(test) is not item):
            item.add_marker(pytest.mark.whole)


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
