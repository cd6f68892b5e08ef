"""Rows of matrices that `make test-whole` runs and `make test` does not: a row that stays has the same cause.

Of tests/ranks/test_lightning_matrix.py 21 rows make one run together: by coverage of both ranks none of them takes a line
or branch alone. 22 more left because another test gives a Trainer the same; that was not measured. The others left by
cause. Where one of launchers, links, memory or modules built in parts left, the code that it guards was changed, and a
test that stays failed. What tutorials and long pages alone guard is their text; they left for the time that they take.

A test's rows are named by patterns of their ids, as `fnmatch` reads them. A row that is new runs in both.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest

WHOLE = os.environ.get("WHOLE") == "1"  # set by `make test-whole`
ROWS: dict[str, tuple[str, ...]] = {
    # ---- tests/ranks: other numbers of stages and micro-batches, schedules and ways of what a row of the same has
    "tests/ranks/test_absent_parameters.py::test_a_hook_over_parameters_is_that_of_one_device": (
        "*-ClipsEach", "*-Loops", "*-LogsEach", "3-SkipsNan", "2-ClipsTogether", "2-SomeWithoutGradient",
        "2-ClipsUnrelated",
    ),
    "tests/ranks/test_absent_parameters.py::test_averages_of_weights_are_those_of_one_device": (
        "3-2", "2-5", "2-1",
    ),
    "tests/ranks/test_carried_states.py::test_lightnings_recurrent_demo_is_that_of_one_device": (
        "*options0", "*options1", "*options4", "*options3",
    ),
    "tests/ranks/test_checkpoint_background.py::"
    "test_a_kill_during_a_save_in_the_background_leaves_the_old_or_the_new": (
        "save.shard*", "save.rename*",
    ),
    "tests/ranks/test_checkpoint_background.py::test_a_writer_that_hangs_is_named_on_every_rank": ("",),
    "tests/ranks/test_checkpoint_faults.py::test_kill_at_every_point_leaves_the_old_or_the_new": (
        "into a new folder",
    ),
    "tests/ranks/test_checkpoint_forms.py::test_model_checkpoint_saves_when_it_should": (
        "every second epoch", "no versions",
    ),
    "tests/ranks/test_checkpoint_lightning.py::test_model_checkpoint_keeps_what_it_should": (
        "{'save_top_k': 1}*async", "*save_weights_only*async", "*'save_last': True}-None-",
        "*'save_last': 'link'*async",
    ),
    "tests/ranks/test_checkpoint_resume.py::test_hops_between_layouts_keep_every_bit": (
        "stages", "stages per rank",
    ),
    "tests/ranks/test_checkpoint_resume.py::test_resume_at_an_epochs_end_and_in_its_middle_is_exact": (
        "{'stages': 2, 'num_microbatches': 2}", "{'stages': 4, 'num_microbatches': 2}",
        "{'stages': 1, 'num_microbatches': 2}",
    ),
    "tests/ranks/test_checkpoint_settings.py::test_checksums_are_those_that_were_asked_for": ("off",),
    "tests/ranks/test_closures.py::test_one_rank_runs_the_step_as_often_as_its_optimizer_asks": (
        "quasi-two stages", "repeats-one stage", "wolfe-one stage", "sharpness-two stages",
    ),
    "tests/ranks/test_manual_optimization.py::test_a_step_of_its_own_is_that_of_one_device": ("*-3",),
    "tests/ranks/test_second_derivatives.py::test_a_loss_of_gradients_is_that_of_one_device": ("3-*",),
    "tests/ranks/test_whole_steps.py::test_a_step_is_that_of_one_device": (
        "*-plain-*", "[A-EG-Z]*-3", "Forces-*-2",
    ),
    "tests/ranks/test_compiled_module.py::test_a_compiled_module_trains_as_an_uncompiled_one": ("1-*",),
    "tests/ranks/test_configure_optimizers.py::test_groups_are_those_of_one_device_on_every_stage": (
        "ByNumber", "BySlice", "ByPosition",
    ),
    "tests/ranks/test_copies_of_a_module.py::test_a_copy_of_the_layers_averages_the_weights_of_its_stage": (
        "AveragedLater",
    ),
    "tests/ranks/test_data_order.py::test_a_resumed_run_goes_on_in_the_order_of_one_device": (
        "its own iterator",
    ),
    "tests/ranks/test_documentation.py::test_a_script_trains_and_prints_what_its_page_says": (
        "text1", "text2",
    ),
    "tests/ranks/test_documentation.py::test_the_blocks_of_a_page_run_one_after_the_other": (
        "docs/tutorials/gpt.md", "docs/tutorials/transformers.md", "docs/howto/start.md", "docs/plan.md",
        "docs/howto/fit.md", "docs/tutorials/vision.md",
    ),
    "tests/ranks/test_documentation.py::test_the_blocks_of_a_page_that_belong_together_run": (
        "*/large-models.md",
    ),
    "tests/ranks/test_documentation.py::test_the_parts_of_a_page_run_with_the_readers_module": (
        "docs/faq.md", "docs/howto/resume.md",
    ),
    "tests/ranks/test_effects_beside_the_module.py::*": ("1",),
    "tests/ranks/test_epoch_end.py::*": ("2", "1"),
    "tests/ranks/test_examples.py::test_the_demo_trains_saves_and_writes": ("0",),
    "tests/ranks/test_finetuning.py::test_a_backbone_is_unfrozen_on_all_stages_alike": ("2",),
    "tests/ranks/test_finetuning.py::test_a_resume_goes_on_with_the_groups_that_the_callback_added": (
        "2-2-True", "1-2-False",
    ),
    "tests/ranks/test_gather_weights.py::test_runs_go_on_from_weights_that_were_left_on_their_ranks": (
        "partition0",
    ),
    "tests/ranks/test_gradient_hooks.py::test_a_hook_of_one_rank_alone_sees_every_gradient": ("3",),
    "tests/ranks/test_gradient_scaler.py::test_all_stages_scale_and_skip_alike": (
        "None-ZBH1", "0-1F1B", "6-1F1B",
    ),
    "tests/ranks/test_gradient_scaler.py::test_replicas_scale_and_skip_alike": ("3e+38-*",),
    "tests/ranks/test_growth.py::test_a_module_that_changes_in_a_run_is_what_it_is_on_one_device": (
        "ZBH1", "Interleaved1F1B", "over the batch",
    ),
    "tests/ranks/test_growth.py::test_a_run_that_grew_goes_on_from_its_checkpoint": ("one file",),
    "tests/ranks/test_hook_logs.py::test_a_value_of_several_stages_is_logged_as_on_one_device": (
        "EachBatch", "Mixes",
    ),
    "tests/ranks/test_hook_logs.py::test_what_one_stage_alone_has_is_logged_on_every_rank": ("2",),
    "tests/ranks/test_hooks_touch_weights.py::"
    "test_a_hook_that_reads_and_changes_weights_gives_that_of_one_device": (
        "AveragesByLayer", "ChangesEach", "CopiesALayer", "StartsAnew", "ReadsANumber", "AssignsGradients",
        "ChangesTogether", "FillsABuffer",
    ),
    "tests/ranks/test_late_device.py::test_a_batch_with_clipping_and_optimizer_reads_nothing_to_the_host": (
        "pipeline1", "pipeline2",
    ),
    "tests/ranks/test_late_device.py::"
    "test_every_schedule_uses_what_has_arrived_and_nothing_that_was_let_go_of": (
        "VHalf-*", "VMin-*", "ZBH2-*", "InterleavedZeroBubble-*", "Interleaved1F1B-2-*",
        "GPipe-2-0-serial", "1F1B-4-*", "ZBV-2-0-serial", "LoopedBFS-2-0-serial",
        "Interleaved1F1B-4-0-serial", "DualPipeV-4-0-serial", "ZBV-2-0-ipc", "LoopedBFS-2-0-ipc",
        "GPipe-2-0-ipc", "1F1B-2-1-serial",
    ),
    "tests/ranks/test_late_device.py::test_fits_with_ragged_batches_and_validation_equal_those_on_the_cpu": (
        "pipeline2-*", "pipeline3-*", "pipeline1-*",
    ),
    "tests/ranks/test_late_device.py::"
    "test_the_host_comes_to_the_end_of_a_step_that_the_device_has_not_begun": (
        "1F1B-*",
    ),
    "tests/ranks/test_late_effects.py::test_effects_of_later_batches_are_those_of_one_device": ("pipeline0",),
    "tests/ranks/test_late_effects.py::test_weights_written_in_place_are_written_once_a_batch": ("1",),
    "tests/ranks/test_late_effects.py::test_what_later_batches_write_in_place_is_written_once": ("1",),
    "tests/ranks/test_launch_order.py::"
    "test_a_fit_with_ragged_batches_and_validation_equals_the_one_over_gloo": (
        "1F1B 2x1", "GPipe 4x1", "ZBV 2x1",
    ),
    "tests/ranks/test_launch_order.py::test_every_schedule_has_the_gradients_of_one_process": (
        "*-2-None", "*-4-1", "VHalf-2-1", "ZBH1-2-1", "GPipe-2-1", "LoopedBFS-2-1",
        "InterleavedZeroBubble-2-1", "GPipe-4-None", "LoopedBFS-4-None", "VHalf-4-None", "ZBH2-4-None",
        "VMin-4-None", "InterleavedZeroBubble-4-None",
    ),
    "tests/ranks/test_lightning_batches.py::"
    "test_batches_that_are_mappings_of_any_class_train_as_on_one_device": (
        "Written",
    ),
    "tests/ranks/test_lightning_checkpoint.py::test_a_resumed_run_equals_one_that_was_not_stopped": (
        "2-frozen", "3-frozen",
    ),
    "tests/ranks/test_lightning_fit.py::test_any_layout_equals_one_device": ("*'broadcast'}", "*'GPipe'*"),
    "tests/ranks/test_lightning_fit.py::test_fit_equals_one_device": (
        "{'accumulate_grad_batches': 2}", "{'gradient_clip_val': 0.05}",
    ),
    "tests/ranks/test_lightning_fit.py::test_two_replicas_of_two_stages_average_their_gradients": ("1F1B",),
    "tests/ranks/test_lightning_launch.py::test_a_script_spawns_its_ranks": ("",),
    "tests/ranks/test_lightning_launch.py::test_two_trainers_in_one_script": ("torchrun", "two nodes"),
    "tests/ranks/test_load_weights.py::test_each_rank_reads_its_own": (
        "safetensors-load_weights", "state_dict-load_weights", "index-ckpt_path", "inner-ckpt_path",
        "inner-load_weights", "index-load_weights",
    ),
    "tests/ranks/test_loss_over_batch.py::test_weights_and_logs_are_those_of_whole_batches_on_one_device": (
        "pipeline1", "pipeline2",
    ),
    "tests/ranks/test_loss_weights.py::test_weights_and_logs_are_those_of_whole_batches_on_one_device": (
        "Masked-1", "Masked-2", "Masked-0", "Summed-0",
    ),
    "tests/ranks/test_manual_optimization.py::test_mixed_precision_is_that_of_one_device": ("bf16-mixed",),
    "tests/ranks/test_manual_optimization.py::"
    "test_tied_weights_clipping_and_schedules_are_those_of_one_device": (
        "2-torch", "2-lightning",
    ),
    "tests/ranks/test_memory_held.py::test_with_1f1b_a_stage_holds_as_many_microbatches_as_stages_follow": (
        "2",
    ),
    "tests/ranks/test_memory_monitor.py::test_a_loss_that_is_followed_leaves_no_micro_batch_behind": (
        "GPipe", "1F1B",
    ),
    "tests/ranks/test_memory_monitor.py::test_a_short_or_silent_run_ends_with_the_table_on_rank_0": (
        "three steps",
    ),
    "tests/ranks/test_memory_monitor.py::"
    "test_gradient_checkpointing_of_transformers_is_planned_as_measured": (
        "False",
    ),
    "tests/ranks/test_memory_monitor.py::test_only_chosen_steps_are_counted": ("None-19-2",),
    "tests/ranks/test_memory_monitor.py::test_stages_hold_as_many_microbatches_as_the_plan_says": (
        "1F1B-2", "GPipe-2",
    ),
    "tests/ranks/test_memory_monitor.py::test_the_demo_holds_what_was_foreseen": (
        "GPipe-*", "1F1B-*", "Interleaved1F1B-*", "ZBH1-*",
    ),
    "tests/ranks/test_mended_by_review.py::"
    "test_a_data_module_loads_its_state_as_on_load_checkpoint_has_edited_it": (
        "False",
    ),
    "tests/ranks/test_metrics_in_a_step.py::test_metrics_are_given_the_numbers_of_the_batch": ("3",),
    "tests/ranks/test_mixed_samples.py::test_ranks_have_their_samples_of_what_one_device_mixes": (
        "1F1B", "ZBH1",
    ),
    "tests/ranks/test_models_train.py::test_weights_and_optimizer_state_after_four_steps": (
        "residual-2-*", "unet-4-*", "gpt2-*", "bert-*", "t5-4-*", "llama-*", "perceptron-*",
        "residual-3-*", "unet-3-*",
    ),
    "tests/ranks/test_monitored_runs.py::test_nothing_breaks_in_a_special_run": (
        "three batches", "barebones",
    ),
    "tests/ranks/test_nonfinite.py::test_a_step_that_one_stage_cannot_take_is_left_out_by_all": ("*-2",),
    "tests/ranks/test_nothing_is_patched.py::test_a_run_leaves_nothing_replaced": ("1F1B-*",),
    "tests/ranks/test_one_file.py::test_a_checkpoint_plugin_writes_and_reads_its_own_format": ("async",),
    "tests/ranks/test_one_file.py::test_several_stages_write_the_file_that_one_device_writes": ("False",),
    "tests/ranks/test_other_device.py::test_stages_of_one_rank": (
        "no room for the whole-Looks", "room for the whole-Residual", "room for the whole-Looks",
    ),
    "tests/ranks/test_other_device.py::test_two_ranks": ("1F1B-host", "ZBH1-nccl"),
    "tests/ranks/test_out_of_memory.py::test_every_rank_reads_the_table_and_advice_that_fits": (
        "host-pipeline2-*", "device-pipeline3-*",
    ),
    "tests/ranks/test_parameter_loops.py::*": ("2",),
    "tests/ranks/test_pipeline_timeline.py::test_nothing_breaks": ("barebones-*", "max_steps-*"),
    "tests/ranks/test_runtime_executor.py::test_gradients_equal_one_process_to_the_last_bit": (
        "*-2-4", "GPipe-2-*", "1F1B-3-4", "GPipe-3-1",
    ),
    "tests/ranks/test_runtime_failure.py::test_a_lost_process_is_named": ("0-kill", "1-exit", "2-kill"),
    "tests/ranks/test_runtime_failure.py::test_all_ranks_report_the_exception_of_one": ("0-B", "1-F", "2-F"),
    "tests/ranks/test_same_data.py::test_data_that_hooks_draw_are_those_of_one_device": (
        "{'num_sanity_val_steps': 0}", "*overfit_batches*", "*limit_val_batches*",
    ),
    "tests/ranks/test_same_data.py::test_data_without_a_seed_come_from_one_rank_with_a_warning": ("True",),
    "tests/ranks/test_save_weights.py::test_a_hugging_face_folder_comes_back_as_one": ("none-4",),
    "tests/ranks/test_schedules_train.py::test_a_schedule_trains_with_the_gradients_of_one_process": (
        "1F1B-4-4", "ZBV-4-4", "ZBH1-2-9", "Auto-2-8", "Interleaved1F1B-2-8",
    ),
    "tests/ranks/test_set_by_hooks.py::test_weights_that_a_hook_keeps_are_read_on_all_stages": (
        "Anchored-2", "AnchoredInValidation-2",
    ),
    "tests/ranks/test_set_by_hooks.py::test_what_hooks_set_is_read_in_the_step": (
        "SetByCallback", "BuiltInParts", "SetWithOptimizers", "Started", "BuiltFromAList", "Prototypes",
    ),
    "tests/ranks/test_staged.py::test_modules_train_as_on_one_device": ("t5-4",),
    "tests/ranks/test_staged.py::test_own_weights_are_those_of_one_device": ("Elaborate-4",),
    "tests/ranks/test_staged.py::test_weights_of_a_checkpoint_are_read_and_not_made": ("file", "folder"),
    "tests/ranks/test_step_attributes.py::test_lists_in_containers_have_what_one_device_added": (
        "KeepsByLoader",
    ),
    "tests/ranks/test_step_attributes.py::test_what_a_step_keeps_is_that_of_one_device": ("2-1", "2-4"),
    "tests/ranks/test_steps_by_message.py::*": ("2",),
    "tests/ranks/test_trainer_in_a_step.py::test_the_trainers_callbacks_are_the_users": ("options0",),
    "tests/ranks/test_trainer_in_a_step.py::test_validation_is_not_what_the_check_before_training_was": (
        "calls",
    ),
    "tests/ranks/test_trainer_properties.py::test_attributes_are_those_of_one_device": ("{}",),
    "tests/ranks/test_unit_effects.py::test_what_units_keep_is_that_of_one_device_on_every_rank": (
        "2-4-1F1B", "3-1-1F1B", "2-2-ZBH1",
    ),
    "tests/ranks/test_whole_model.py::test_a_hook_may_call_the_module": ("2-*",),
    "tests/ranks/test_whole_model.py::test_a_run_is_saved_before_a_hook_is_refused": ("ReadsAloneAfterTwo",),
    "tests/ranks/test_whole_trainer.py::test_metrics_logged_on_epoch_in_training_need_nobody_else": (
        "tqdm", "asks",
    ),
    # ---- those that compare times
    "tests/ranks/test_bubble_monitor.py::test_bubble_idle_and_forward_are_what_a_second_stopwatch_sees": (
        "2-*-False", "4-*-False", "4-GPipe-*", "4-Interleaved1F1B-*", "2-GPipe-*",
    ),
    "tests/ranks/test_late_faults.py::test_every_rank_knows_the_first_cause_in_time": ("stop-W",),
    "tests/ranks/test_plan.py::test_step_bubble_and_memory_are_as_predicted": ("1F1B",),
    # ---- tests/faults and tests/unit
    "tests/faults/test_resume.py::test_a_chain_goes_on_over_other_ranks_and_schedules": ("1-0.0-*",),
    "tests/faults/test_resume.py::test_a_chain_of_resumed_runs_is_the_uninterrupted_run": ("2-stops3-*",),
    "tests/faults/test_units.py::test_an_exception_in_a_unit_is_told_by_all": (
        "fail-validation-*", "quit_it-*",
    ),
    "tests/faults/test_units.py::test_what_all_ranks_do_ends_them_as_one_device": ("interrupt-1",),
    "tests/unit/checkpoint/test_consolidate_memory.py::"
    "test_consolidating_takes_less_memory_than_the_checkpoint_has": (
        "",
    ),
    "tests/unit/planning/test_command.py::test_stages_are_measured_with_weights": ("new processes",),
    "tests/unit/schedules/test_auto.py::test_bubbles_at_1f1bs_memory_with_measured_costs": ("costs2-*",),
    "tests/unit/split/test_circles.py::test_a_layer_that_undoes_itself_at_the_end_runs_on_every_stage": (
        "2",
    ),
    "tests/unit/split/test_dictionaries_in_steps.py::test_a_dictionary_is_filled_as_on_one_device": (
        "of_[nlt]*-four", "each_batch_anew-two", "in_dictionaries-four", "by_*-four", "of_deques-two", "updated-four",
        "of_sets-four", "pairs-four",
    ),
    "tests/unit/split/test_effects.py::test_a_step_leaves_what_one_device_leaves": ("*-2-4", "[A-F]*-3-2", "Lazy-3-2"),
    "tests/unit/split/test_losses_by_sample.py::test_a_loss_in_a_loop_over_samples_is_one_devices": (
        "anchors-two", "clamped-four", "hard_negatives-two", "relative-four",
    ),
    "tests/unit/split/test_rows_that_are_picked.py::test_a_loss_over_picked_samples_is_one_devices": (
        "by_[miw]*-two", "by_[ap]*-four", "where*-four", "a_weight*-two",
    ),
    "tests/unit/split/test_steps_as_written.py::test_a_step_is_that_of_one_device_without_a_word": (
        "A*-two", "C*-four", "P*-four", "ByTheSpread-four", "LogsInSomeBatches-two", "M*-two", "NoneIfNothing-two", "Perplexity-two",
        "Remembered-two", "Table-two",
    ),
    "tests/unit/split/test_texts_and_trackers.py::test_texts_and_trackers_are_one_devices": (
        "Teaches-two", "Tracks-four",
    ),
    "tests/unit/split/test_hooks_at_a_cut.py::*": ("1-False-*", "2-True-*"),
    "tests/unit/split/test_hooks_of_a_step.py::test_a_hook_that_goes_by_samples_is_that_of_one_device": (
        "8-*",
    ),
    "tests/unit/split/test_hooks_of_a_step.py::test_a_hook_that_mixes_or_keeps_samples_is_warned_of": (
        "2-*",
    ),
    "tests/unit/split/test_hooks_of_a_step.py::"
    "test_a_modules_hook_that_goes_by_samples_is_that_of_one_device": ("2-*",),
    "tests/unit/split/test_hooks_of_a_step.py::test_a_backward_that_goes_by_samples_is_that_of_one_device": (
        "8-*",
    ),
    "tests/unit/split/test_hooks_of_a_step.py::test_a_backward_that_mixes_samples_is_warned_of": (
        "1-norm*", "2-*",
    ),
    "tests/unit/split/test_host_seeds.py::test_host_numbers_are_those_of_the_seed": ("Seeds*-layers.1",),
    "tests/unit/split/test_joined_views.py::test_a_loss_over_the_batch_has_the_views_of_all_samples": (
        "Views-three", "ThreeCrops-two", "SamplesFirst-three", "CropsOfTokens-two", "Predicted-three",
    ),
    "tests/unit/split/test_joined_views.py::test_views_that_are_drawn_are_joined_likewise": ("three",),
    "tests/unit/split/test_joined_views.py::test_what_a_step_leaves_of_joined_views_is_one_devices": ("four",),
    "tests/unit/split/test_logged_as_one.py::test_a_number_that_no_micro_batch_tells_is_one_devices": (
        "explained-four", "root-*", "median-four", "quantile-two", "largest-four", "spread_of_features-two",
        "f1-four", "correlation-two",
    ),
    "tests/unit/split/test_numpy_counts.py::test_a_matrix_of_a_validation_is_one_devices": ("one", "three"),
    "tests/unit/split/test_numpy_counts.py::test_counts_in_an_array_are_one_devices": (
        "Counts-three", "EmptiedEachEpoch-*", "AnewEachEpoch-one", "AnewEachEpoch-three", "OfTargetsAlone-one",
        "OfTargetsAlone-two", "BeforeTheUnits-two", "BeforeTheUnits-three", "InADictionary-one",
        "InADictionary-three", "InAnObject-two", "InAnObject-three", "OfAGlobal-one", "OfAGlobal-three",
        "MovingAverage-one", "MovingAverage-three", "Largest-one", "Largest-two", "AHistory-one", "AHistory-three",
        "WeighsByCounts-one", "WeighsByCounts-two", "FromTheThirdBatch-one", "FromTheThirdBatch-three",
    ),
    "tests/unit/split/test_undone_writes.py::test_a_buffer_in_a_graph_is_as_it_was_kept": (
        "1-*", "2-1F1B", "3-Interleaved1F1B",
    ),
    "tests/unit/split/test_loss_draws.py::test_a_drawn_divisor_is_the_sum_of_those_of_the_micro_batches": (
        "*-False",
    ),
    "tests/unit/split/test_loss_over_batch.py::test_gradients_and_logs_are_those_of_the_whole_batch": (
        "Contrastive-2-*", "Clip-2-*", "WithHeadBehind-2-*", "BarlowTwins-3-*", "Leaves-3-*",
        "WithCriterion-3-*",
    ),
    "tests/unit/split/test_loss_weights.py::test_a_padded_language_model_trains_as_on_the_whole_batch": (
        "*-1", "gpt2-7", "llama-*", "t5-7", "bert-4",
    ),
    "tests/unit/split/test_loss_weights.py::"
    "test_weights_of_classes_and_smoothing_in_the_step_are_those_of_the_whole_batch": (
        "llama", "bert", "t5",
    ),
    "tests/unit/split/test_mixing_by_state.py::test_numbers_of_the_batch_in_a_state_are_one_devices": (
        "*-8",
    ),
    "tests/unit/split/test_returned_as_one.py::test_what_a_step_returns_is_one_devices": (
        "root-*", "largest-*", "chosen-*", "centered-*", "text-*", "any_is_large-two", "[tmrpcb]*-four",
    ),
    "tests/ranks/test_as_one.py::test_what_a_step_returns_is_one_devices": (
        "*-test", "*-validate", "centred-*", "in_a_list-*", "ordered-fit",
    ),
    "tests/unit/split/test_mixing.py::test_a_step_whose_samples_of_the_batch_are_not_found_is_warned_of": (
        "in_halves",
    ),
    "tests/unit/split/test_mixing.py::test_micro_batches_have_their_samples_of_what_one_device_mixes": (
        "[!w]*-ZBH1", "weighted_after-ZBH1", "flipped-*", "standardized_targets-*", "told_between-*",
        "advantages-*", "decorrelated-*",
    ),
    "tests/unit/split/test_mixing.py::test_what_is_drawn_to_mix_samples_is_drawn_once_a_batch": (
        "mixup_by_torch", "cutmix",
    ),
    "tests/unit/split/test_mixing.py::test_what_no_operation_shows_to_mix_samples_is_one_devices": (
        "8-*", "3-by_numbers_between", "3-by_a_condition",
    ),
    "tests/unit/split/test_models.py::test_a_split_backward_gives_the_same_bits": ("llama", "bert", "gpt2"),
    "tests/unit/split/test_models.py::test_every_way_to_cut_gives_the_same_gradients": (
        "uniform", "parameters",
    ),
    "tests/unit/split/test_models.py::test_gradients_of_all_stages_are_those_of_one_process": (
        "*-2", "*-3", "llama-4", "bert-4", "t5-4",
    ),
    "tests/unit/split/test_momentum.py::test_a_momentum_encoder_with_a_queue_of_keys_and_its_pointer_works": (
        "MoCo",
    ),
    "tests/unit/split/test_momentum.py::test_a_momentum_encoder_works_with_two_stages_on_a_rank": ("",),
    "tests/unit/split/test_ports.py::test_a_mixture_of_experts_is_spread_evenly_with_its_router_logits": (
        "2-asked0",
    ),
    "tests/unit/split/test_queues.py::"
    "test_places_that_two_samples_of_a_batch_have_are_written_as_by_the_whole_batch": ("4-*",),
    "tests/unit/split/test_queues.py::test_a_queue_is_read_and_written_as_by_the_whole_batch": (
        "LeavesOut-4", "BothSigns-4", "ByNumber-4", "EverySecond-6",
    ),
    "tests/unit/split/test_random_steps.py::test_a_random_step_equals_its_reference_or_is_refused": (
        "[1-9]", "1?", "2?", "3?", "4?",
    ),
    "tests/unit/split/test_recomputation.py::test_gradients_are_those_without_checkpoints": (
        "*-non-reentrant-False", "*-reentrant-True", "*-selective-False", "AroundUnits-reentrant-*",
        "OverUnits-reentrant-*", "AroundGlue-reentrant-*", "Nested-selective-*",
    ),
    "tests/unit/split/test_routes.py::test_layers_left_out_at_random_are_those_of_one_stage": ("numpy-*",),
    "tests/unit/split/test_rules_inplace.py::test_the_place_of_the_cut_does_not_matter": (
        "layers.0-*", "layers.3-*",
    ),
    "tests/unit/split/test_rules_interleaved.py::test_stages_of_one_rank_equal_one_process": ("*-looped",),
    "tests/unit/split/test_user_seeds.py::test_the_numbers_are_those_of_one_device": (
        "*-1", "SeededByBatch-4", "HostSeeds-4", "StepsDrawAgain-4", "UnitsThatSeed-4",
    ),
    "tests/unit/split/test_wide_steps.py::*": ("[2-5]",),
    "tests/unit/split/test_zoo.py::test_a_tiny_model_over_three_stages_equals_one_process": (
        "[h-p]*", "g*", "f*", "b[il]*", "e[lmr]*", "c*", "di*",
    ),
    "tests/unit/test_imports.py::test_in_a_fresh_process": ("strategy first",),
    "tests/unit/test_random_losses.py::test_a_random_loss_is_that_of_the_batch_or_said_to_be_none": (
        "1", "2",
    ),
    "tests/unit/test_random_losses.py::test_another_reduction_of_the_epoch_takes_numbers_of_batches": (
        "'max'",
    ),
}  # fmt: skip


def chosen(rows: Sequence[Any], *daily: int) -> Sequence[Any]:
    """All of them in the whole run, else those at these positions."""
    return rows if WHOLE else [rows[position] for position in daily]


def marked(rows: Iterable[str], left: Sequence[str]) -> list[Any]:
    """Rows by name, of which these are for the whole run alone; a name that is that of no row is a mistake."""
    rows = list(rows)
    assert not set(left) - set(rows), set(left) - set(rows)
    return [pytest.param(row, marks=pytest.mark.whole) if row in left else row for row in rows]


def mark(items: Sequence[pytest.Item], rows_are_chosen: bool) -> None:
    """Mark these rows among what was collected; a pattern that is that of no row is warned of.

    Args:
        items: What was collected.
        rows_are_chosen: Whether rows were named on the command line, so that others are missing.
    """
    rows: dict[str, list[Any]] = {}
    for item in items:
        rows.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, patterns in ROWS.items():
        found = [item for name in rows if fnmatchcase(name, test) for item in rows[name]]
        for pattern in patterns:
            left = [item for item in found if fnmatchcase(_id_of(item), pattern)]
            if found and not left and not rows_are_chosen:
                warnings.warn(pytest.PytestWarning(f"tests/whole.py: {test} has no row {pattern!r}"))
            for item in left:
                item.add_marker(pytest.mark.whole)


def _id_of(item: pytest.Item) -> str:
    """Of a row; of a test without rows the empty one."""
    return item.callspec.id if hasattr(item, "callspec") else ""
