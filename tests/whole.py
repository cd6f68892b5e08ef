"""Which tests `make test` leaves to `make test-rest`, so that it ends in seven minutes; `make test-whole` runs all.

Of a test with rows, in the folders of `ONE_ROW`, `make test` runs the last row: the one that was added last, of most
stages and micro-batches where a matrix goes upwards. `LATER` names tests that take a worker more than some two seconds
and have quicker ones beside them. What CI runs leaves out neither, as long as its time lasts (`UNTIL`).
"""

import os
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest

WHOLE = os.environ.get("WHOLE") == "1"  # set by `make test-rest` and `make test-whole`
UNTIL = float(os.environ.get("TESTS_UNTIL", "inf"))  # seconds since 1970, set by .ci/run
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
        "faults/test_matrix.py::test_a_rank_that_is_busy_in_a_hook_has_hook_timeout",
        "faults/test_matrix.py::test_a_rank_that_is_killed_in_its_last_hook_is_named",
        "faults/test_matrix.py::test_a_stopped_rank_is_named_after_step_timeout",
        "faults/test_matrix.py::test_others_do_not_wait_for_a_callback_that_uploads",
        "faults/test_matrix.py::test_stop_iteration_in_a_forward_is_an_error_of_that_rank",
        "faults/test_resume.py::test_a_chain_goes_on_over_other_ranks_and_schedules",
        "faults/test_resume.py::test_a_chain_of_resumed_runs_is_the_uninterrupted_run",
        "faults/test_resume.py::test_a_job_that_is_started_again_goes_on_where_it_was",
        "faults/test_resume.py::test_an_exception_of_all_ranks_is_saved_and_resumed_exactly",
        "faults/test_resume.py::test_torchrun_starts_a_job_again_that_goes_on_by_itself",
        "faults/test_units.py::test_an_exception_in_a_unit_is_told_by_all",
        "faults/test_units.py::test_fewer_micro_batches_than_stages_and_batches_that_do_not_divide",
        "ranks/test_absent_parameters.py::test_averages_in_a_checkpoint_go_on",
        "ranks/test_carried_states.py::test_lightnings_recurrent_demo_is_that_of_one_device",
        "ranks/test_changed_batches.py::test_containers_in_a_batch_are_as_the_step_leaves_them",
        "ranks/test_changed_batches.py::test_hooks_find_the_batch_as_the_step_leaves_it",
        "ranks/test_checkpoint_background.py::test_a_writer_that_hangs_is_named_on_every_rank",
        "ranks/test_checkpoint_end.py::test_what_late_hooks_save_is_there_when_the_run_returns",
        "ranks/test_checkpoint_faults.py::test_kill_at_every_point_leaves_the_old_or_the_new",
        "ranks/test_checkpoint_forms.py::test_model_checkpoint_saves_when_it_should",
        "ranks/test_checkpoint_lightning.py::test_what_was_loaded_is_there_when_a_fit_begins",
        "ranks/test_checkpoint_requeue.py::test_a_job_that_is_to_end_saves_once_and_goes_on_there",
        "ranks/test_checkpoint_resume.py::test_a_loader_with_state_is_asked_to_go_where_it_was",
        "ranks/test_checkpoint_resume.py::test_hops_between_layouts_keep_every_bit",
        "ranks/test_checkpoint_resume.py::test_resume_at_an_epochs_end_and_in_its_middle_is_exact",
        "ranks/test_checkpoint_settings.py::test_objects_are_read_back_with_trust_and_left_out_by_name_without",
        "ranks/test_checkpoint_settings.py::test_state_of_callbacks_and_data_comes_back_on_every_rank",
        "ranks/test_checkpoint_states.py::test_buffers_of_all_stages_and_ties_between_them_are_kept",
        "ranks/test_checkpoint_states.py::test_state_of_a_callback_by_parameter_name_is_kept_from_all_stages",
        "ranks/test_compiled_module.py::test_a_compiled_module_trains_as_an_uncompiled_one",
        "ranks/test_data_order.py::test_a_run_saved_after_the_last_batch_of_a_stream_goes_on_with_the_next_epoch",
        "ranks/test_data_order.py::test_batches_come_in_the_order_of_one_device",
        "ranks/test_documentation.py::test_a_script_trains_and_prints_what_its_page_says",
        "ranks/test_documentation.py::test_the_blocks_of_a_page_that_belong_together_run",
        "ranks/test_effects_beside_the_module.py::test_counters_rates_and_schedulers_are_those_of_one_device",
        "ranks/test_effects_beside_the_module.py::test_what_a_step_keeps_around_its_class_is_that_of_one_device",
        "ranks/test_epoch_end.py::test_hooks_at_the_epochs_end_run_whole_on_every_rank",
        "ranks/test_epoch_end.py::test_what_a_hook_at_the_epochs_end_logs_is_that_of_one_device_on_every_rank",
        "ranks/test_evaluation_alone.py::test_numbers_of_evaluation_are_those_of_one_device",
        "ranks/test_examples.py::test_an_own_module_gives_on_two_stages_what_it_gives_on_one_device",
        "ranks/test_finetuning.py::test_a_resume_goes_on_with_the_groups_that_the_callback_added",
        "ranks/test_finetuning.py::test_adapters_that_configure_model_puts_around_layers_train_and_resume",
        "ranks/test_gather_weights.py::test_runs_go_on_from_weights_that_were_left_on_their_ranks",
        "ranks/test_growth.py::test_a_module_that_changes_in_a_run_is_what_it_is_on_one_device",
        "ranks/test_growth.py::test_a_run_that_grew_goes_on_from_its_checkpoint",
        "ranks/test_heads_by_mask.py::test_micro_batches_without_samples_of_a_task_are_nothing_to_warn_of",
        "ranks/test_heads_by_mask.py::test_what_the_batch_decides_for_all_of_its_samples_is_decided_for_each_micro_batch",
        "ranks/test_heads_of_tasks.py::test_a_loss_for_each_task_that_is_there",
        "ranks/test_hook_logs.py::test_a_value_of_several_stages_is_logged_as_on_one_device",
        "ranks/test_hook_logs.py::test_numbers_that_decide_nothing_may_differ_and_one_warning_says_so",
        "ranks/test_hook_logs.py::test_what_one_stage_alone_has_is_logged_on_every_rank",
        "ranks/test_hooks_touch_weights.py::test_a_hook_that_reads_and_changes_weights_gives_that_of_one_device",
        "ranks/test_hooks_touch_weights.py::test_a_large_weight_used_with_one_of_another_stage_gives_that_of_one_device_and_is_said_once",
        "ranks/test_late_device.py::test_a_batch_with_clipping_and_optimizer_reads_nothing_to_the_host",
        "ranks/test_late_device.py::test_fits_with_ragged_batches_and_validation_equal_those_on_the_cpu",
        "ranks/test_late_effects.py::test_effects_of_later_batches_are_those_of_one_device",
        "ranks/test_late_effects.py::test_stages_hold_what_weights_are_made_of_in_batches_to_come",
        "ranks/test_late_effects.py::test_what_a_value_of_the_model_lets_a_step_leave_behind_is_on_every_rank_or_warned_of",
        "ranks/test_late_effects.py::test_what_depends_on_numbers_that_change_is_left_once_on_every_rank",
        "ranks/test_late_effects.py::test_what_is_written_between_numbers_that_are_read_is_written_once",
        "ranks/test_late_effects.py::test_what_later_batches_write_in_place_is_written_once",
        "ranks/test_launch_order.py::test_a_fit_with_ragged_batches_and_validation_equals_the_one_over_gloo",
        "ranks/test_lightning_batches.py::test_packed_texts_of_other_lengths_train_as_on_one_device",
        "ranks/test_lightning_checkpoint.py::test_a_resumed_run_equals_one_that_was_not_stopped",
        "ranks/test_lightning_fit.py::test_fit_equals_one_device",
        "ranks/test_lightning_fit.py::test_functions_of_one_or_several_trainers_follow_each_other",
        "ranks/test_lightning_fit.py::test_replicas_and_shared_weights_start_and_stay_equal",
        "ranks/test_lightning_fit.py::test_two_replicas_of_two_stages_average_their_gradients",
        "ranks/test_lightning_launch.py::test_a_script_spawns_its_ranks",
        "ranks/test_lightning_launch.py::test_two_trainers_in_one_script",
        "ranks/test_lightning_logging.py::test_a_module_may_split_and_merge_itself_and_bring_its_optimizer",
        "ranks/test_lightning_logging.py::test_metrics_and_hooks_log_what_one_device_logs",
        "ranks/test_lightning_matrix.py::test_the_clock_of_global_rank_0_says_when_to_validate",
        "ranks/test_logs_by_size.py::test_what_only_the_whole_batch_logs_is_logged",
        "ranks/test_loss_over_batch.py::test_weights_and_logs_are_those_of_whole_batches_on_one_device",
        "ranks/test_loss_weights.py::test_weights_and_logs_are_those_of_whole_batches_on_one_device",
        "ranks/test_manual_optimization.py::test_a_run_is_resumed_where_it_was",
        "ranks/test_manual_optimization.py::test_replicas_average_their_gradients",
        "ranks/test_manual_optimization.py::test_tied_weights_clipping_and_schedules_are_those_of_one_device",
        "ranks/test_memory_monitor.py::test_gradient_checkpointing_of_transformers_is_planned_as_measured",
        "ranks/test_metrics_in_a_step.py::test_metrics_are_given_the_numbers_of_the_batch",
        "ranks/test_metrics_in_a_step.py::test_what_a_metric_counts_is_no_reason_to_look_again",
        "ranks/test_mixed_samples.py::test_ranks_draw_alike_to_mix_samples",
        "ranks/test_mixed_samples.py::test_ranks_have_their_samples_of_what_one_device_mixes",
        "ranks/test_monitored_runs.py::test_a_config_has_the_callbacks_the_bar_the_bubble_and_the_table_tokens",
        "ranks/test_moving_items.py::test_items_of_all_batches_are_there",
        "ranks/test_nonfinite.py::test_a_step_that_one_replica_cannot_take_is_left_out_by_all",
        "ranks/test_nonfinite.py::test_nothing_more_is_sent_for_it",
        "ranks/test_one_device_replicas.py::test_replicas_have_the_buffers_of_the_first_one_as_under_ddp",
        "ranks/test_one_device_replicas.py::test_replicas_of_one_stage_are_ddp",
        "ranks/test_one_file.py::test_a_checkpoint_plugin_writes_and_reads_its_own_format",
        "ranks/test_one_file.py::test_a_one_file_checkpoint_of_two_stages_goes_on_in_mid_epoch",
        "ranks/test_one_process.py::test_a_step_that_gathers_of_replicas_is_that_of_one_device",
        "ranks/test_other_device.py::test_checkpoints_validation_and_prediction",
        "ranks/test_other_device.py::test_collectives_that_serve_only_the_device",
        "ranks/test_other_device.py::test_modules_say_where_they_are",
        "ranks/test_other_device.py::test_stages_of_one_rank",
        "ranks/test_other_device.py::test_two_ranks",
        "ranks/test_outputs_kept.py::test_an_array_that_is_written_sample_by_sample_is_one_devices",
        "ranks/test_padding_inside.py::test_padding_that_a_layer_counts_is_told",
        "ranks/test_pipeline_timeline.py::test_a_profiler_s_trace_carries_the_actions_names",
        "ranks/test_pipeline_timeline.py::test_of_replicas_the_first_is_recorded",
        "ranks/test_random_effects.py::test_a_condition_on_the_batch_decides_an_effect_once",
        "ranks/test_random_effects.py::test_a_list_that_becomes_a_number_between_batches_is_looked_at",
        "ranks/test_random_effects.py::test_how_much_a_hook_has_put_into_a_list_decides",
        "ranks/test_random_effects.py::test_random_effects_are_those_of_one_device",
        "ranks/test_random_effects.py::test_what_the_first_batches_leave_as_it_was_is_tried_out_later",
        "ranks/test_runtime_failure.py::test_a_failed_rank_that_lives_on_frees_its_peers_at_once",
        "ranks/test_runtime_failure.py::test_a_stage_that_takes_too_long_is_named_by_all_that_wait",
        "ranks/test_same_data.py::test_a_resumed_run_takes_nothing_from_a_stream",
        "ranks/test_same_data.py::test_data_that_hooks_draw_are_those_of_one_device",
        "ranks/test_same_data.py::test_data_without_a_seed_come_from_one_rank_with_a_warning",
        "ranks/test_same_data.py::test_samplers_are_told_their_epoch_once_and_loaders_keep_their_class",
        "ranks/test_save_weights.py::test_a_hugging_face_folder_comes_back_as_one",
        "ranks/test_set_by_hooks.py::test_a_step_takes_what_a_hook_has_set_in_the_place_of_nothing",
        "ranks/test_sizes_alike.py::test_a_packed_layer_as_wide_as_the_batch_is_that_of_one_device",
        "ranks/test_sizes_by_values.py::test_a_width_that_is_read_or_predicted_is_refused_in_words",
        "ranks/test_sizes_by_values.py::test_an_encoder_gives_as_many_words_as_lengths_say",
        "ranks/test_sizes_by_values.py::test_every_rank_has_what_a_step_counts",
        "ranks/test_sizes_by_values.py::test_padding_of_the_batch_that_counts_is_told",
        "ranks/test_sizes_by_values.py::test_widths_that_differ_matter_where_they_are_read_alone",
        "ranks/test_staged.py::test_no_phase_takes_more_than_a_share_and_a_tensor",
        "ranks/test_staged.py::test_own_weights_are_those_of_one_device",
        "ranks/test_staged.py::test_weights_of_a_checkpoint_are_read_and_not_made",
        "ranks/test_step_attributes.py::test_buffers_that_the_end_of_a_step_writes_are_on_every_rank",
        "ranks/test_step_attributes.py::test_hooks_of_batches_read_lists_on_every_rank",
        "ranks/test_step_attributes.py::test_what_a_step_keeps_is_that_of_one_device",
        "ranks/test_steps_by_message.py::test_manual_optimization_is_that_of_one_device",
        "ranks/test_steps_by_message.py::test_tokens_are_generated_in_a_step",
        "ranks/test_template_project.py::test_a_project_of_the_template_is_that_of_one_device",
        "ranks/test_trainer_in_a_step.py::test_a_step_reads_its_learning_rate_and_its_trainer",
        "ranks/test_trainer_properties.py::test_attributes_are_those_of_one_device",
        "ranks/test_unit_effects.py::test_what_no_rule_puts_together_is_told_on_one_rank_too",
        "ranks/test_unit_effects.py::test_what_units_keep_is_that_of_one_device_on_every_rank",
        "ranks/test_unit_values.py::test_what_is_done_by_the_value_of_the_loss_is_left_on_every_rank",
        "ranks/test_ways.py::test_depth_by_epoch_and_heads_by_batch_train_as_on_one_device",
        "ranks/test_what_layers_return.py::test_layers_may_return_a_tensor_in_some_batches",
        "ranks/test_what_layers_return.py::test_numbers_that_layers_return_are_those_of_the_batch",
        "ranks/test_whole_model.py::test_a_run_is_saved_before_a_hook_is_refused",
        "ranks/test_whole_steps.py::test_a_step_is_that_of_one_device",
        "ranks/test_whole_steps.py::test_what_one_rank_cannot_run_for_another_is_refused",
        "ranks/test_whole_trainer.py::test_a_run_says_once_what_it_does",
        "ranks/test_whole_trainer.py::test_metrics_logged_on_epoch_in_training_need_nobody_else",
        "ranks/test_whole_trainer.py::test_metrics_of_replicas_are_read_by_a_bar_on_one_rank",
        "ranks/test_whole_trainer.py::test_throughput_counts_a_batch_once",
        "unit/checkpoint/test_consolidate_memory.py::test_consolidating_takes_less_memory_than_the_checkpoint_has",
        "unit/planning/test_command.py::test_stages_are_measured_with_weights",
        "unit/planning/test_link.py::test_the_reason_of_a_process_that_has_torch_is_told",
        "unit/planning/test_measure.py::test_forwards_and_backwards_take_what_they_sleep",
        "unit/schedules/test_auto.py::test_bubbles_at_1f1bs_memory_with_measured_costs",
        "unit/split/test_dictionaries_in_steps.py::test_every_rank_has_it_at_the_epochs_end",
        "unit/split/test_inference_mode.py::test_a_user_may_ask_for_it",
        "unit/split/test_inference_mode.py::test_no_step_of_a_pipeline_runs_in_inference_mode",
        "unit/split/test_joined_views.py::test_ranks_join_the_views_of_all_samples",
        "unit/split/test_logged_as_one.py::test_every_rank_logs_it",
        "unit/split/test_logged_numbers.py::test_what_nothing_puts_together_says_so",
        "unit/split/test_loops_over_words.py::test_each_length_goes_its_own_way",
        "unit/split/test_loops_over_words.py::test_ranks_go_the_same_way",
        "unit/split/test_loss_over_batch.py::test_a_model_of_hugging_face_with_its_own_loss",
        "unit/split/test_losses_by_sample.py::test_a_loss_in_a_loop_over_samples_is_one_devices",
        "unit/split/test_mixing.py::test_what_no_operation_shows_to_mix_samples_is_one_devices",
        "unit/split/test_mixing.py::test_what_python_draws_after_units_is_drawn_once_a_batch",
        "unit/split/test_mixing_by_state.py::test_ranks_that_fill_lists_have_their_samples_of_what_is_mixed",
        "unit/split/test_models.py::test_a_split_backward_gives_the_same_bits",
        "unit/split/test_models.py::test_every_way_to_cut_gives_the_same_gradients",
        "unit/split/test_momentum.py::test_a_momentum_encoder_with_a_queue_of_keys_and_its_pointer_works",
        "unit/split/test_momentum.py::test_a_momentum_encoder_works_with_two_stages_on_a_rank",
        "unit/split/test_momentum.py::test_an_average_that_is_written_in_place_is_that_of_the_batch",
        "unit/split/test_numpy_counts.py::test_every_rank_has_what_was_counted",
        "unit/split/test_ports.py::test_a_mixture_of_experts_is_spread_evenly_with_its_router_logits",
        "unit/split/test_returned_as_one.py::test_every_rank_is_told_what_a_training_step_returns",
        "unit/split/test_rules_states.py::test_caches_filled_in_a_unit_hold_no_placeholder_after_the_trace",
        "unit/split/test_steps_as_written.py::test_a_step_is_that_of_one_device_without_a_word",
        "unit/split/test_texts.py::test_words_that_are_packed_between_layers_have_no_padding",
        "unit/split/test_texts_and_trackers.py::test_metrics_that_an_object_holds_are_one_devices",
        "unit/split/test_texts_and_trackers.py::test_states_that_follow_by_no_rule_are_one_devices_or_warned_of",
        "unit/split/test_texts_and_trackers.py::test_texts_and_trackers_are_one_devices",
        "unit/split/test_texts_and_trackers.py::test_what_comes_after_a_line_that_needs_values_is_warned_of",
        "unit/split/test_units_that_mix.py::test_a_compiled_layer_is_warned_of_and_runs_compiled_as_often",
        "unit/split/test_units_that_mix.py::test_large_layers_are_left_out",
        "unit/test_imports.py::test_in_a_fresh_process",
        "unit/test_random_losses.py::test_a_metric_given_a_python_number_has_the_batch_s",
        "unit/test_random_losses.py::test_a_number_that_cannot_be_followed_is_that_of_the_batch_as_one",
        "unit/test_random_losses.py::test_what_is_logged_is_the_number_of_the_batch",
        "unit/test_random_losses.py::test_what_was_not_kept_for_the_batch_as_one_is_not_guessed",
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


def in_turn(items: Sequence[pytest.Item], until: float = UNTIL) -> list[pytest.Item]:
    """Where the time ends, file by file, beginning with another one each day: none is always the last."""
    files = [list(group) for _, group in groupby(items, lambda item: item.nodeid.partition("::")[0])]
    begin = 0 if until == float("inf") or not files else 31 * int(until // 86_400) % len(files)
    return [item for file in [*files[begin:], *files[:begin]] for item in file]


def leave_out_late(until: float = UNTIL) -> None:
    """Before a test: leave it out where no time is left for it."""
    if time.time() > until:
        pytest.skip("the time that CI has for `make test-rest` is over; run it without TESTS_UNTIL")


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
