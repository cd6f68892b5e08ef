"""The fault matrix: what goes wrong, what should come of it, and the tests that provoke it."""

from dataclasses import dataclass

UNITS, MATRIX, START = (
    "tests/faults/test_units.py",
    "tests/faults/test_matrix.py",
    "tests/faults/test_start.py",
)
DATA, RESUME, AGREE = (
    "tests/faults/test_data.py",
    "tests/faults/test_resume.py",
    "tests/faults/test_agreement.py",
)
LOADING, LINK = "tests/faults/test_loading.py", "tests/faults/test_cut_link.py"
SAVES, DISK = "tests/ranks/test_checkpoint_faults.py", "tests/ranks/test_checkpoint_disk.py"
BEHIND, LIGHTNING = "tests/ranks/test_checkpoint_background.py", "tests/ranks/test_checkpoint_lightning.py"
SIGTERM, NONFINITE = "tests/ranks/test_sigterm.py", "tests/ranks/test_nonfinite.py"
SCALER, MESSAGES = "tests/ranks/test_gradient_scaler.py", "tests/ranks/test_runtime_failure.py"
CHECKPOINT = "tests/unit/checkpoint"

STOPPED = f"{MATRIX}::test_a_stopped_rank_is_named_after_step_timeout"
IN_HOOK = f"{MATRIX}::test_an_exception_in_a_hook_is_told_by_all"
IN_UNIT = f"{UNITS}::test_an_exception_in_a_unit_is_told_by_all"
ENDED = f"{UNITS}::test_a_process_that_ends_is_named"
UPLOAD = f"{MATRIX}::test_others_do_not_wait_for_a_callback_that_uploads"
TERMINATED = f"{MATRIX}::test_a_sigterm_anywhere_in_a_fit_ends_all_ranks_alike_with_a_checkpoint"
DIFFER = f"{AGREE}::test_a_difference_is_named_with_both_values"
CHAIN = f"{RESUME}::test_a_chain_of_resumed_runs_is_the_uninterrupted_run"
RESHARDED = f"{RESUME}::test_a_chain_goes_on_over_other_ranks_and_schedules"
KILLED = f"{SAVES}::test_kill_at_every_point_leaves_the_old_or_the_new"
WRITE = f"{SAVES}::test_every_rank_fails_with_the_cause_and_nothing_is_left"
HOSTILE = f"{CHECKPOINT}/test_hostile.py"
DAMAGED = f"{CHECKPOINT}/test_corruption.py"


@dataclass(frozen=True)
class Row:
    """One row of the matrix.

    Attributes:
        what: Goes wrong.
        expected: What should come of it.
        tests: That show it; each with all its parameters.
    """

    what: str
    expected: str
    tests: tuple[str, ...]


ROWS = {
    "F01": Row("SIGKILL of a middle stage in a forward", "all name it", (ENDED,)),
    "F02": Row("SIGKILL of the last stage in a backward", "all name it", (ENDED,)),
    "F03": Row("SIGKILL of global rank 0, which hosts the store", "all name it", (
        ENDED, f"{MATRIX}::test_a_killed_rank_is_named",
    )),
    "F04": Row("SIGSTOP of a stage, of rank 0, in a step and in hooks", "named after step_timeout", (STOPPED,)),
    "F05": Row("exception in a forward", "the same cause on all ranks", (IN_UNIT,)),
    "F06": Row("exception while an `on_exception` uploads", "the others end first", (UPLOAD,)),
    "F07": Row("exception in a backward, before an optimizer step", "the same cause on all ranks", (IN_UNIT,)),
    "F08": Row("`sys.exit(0)`, `os._exit(0)` on one stage", "the others end with 1", (ENDED, IN_UNIT)),
    "F09": Row("out of memory", "table and advice on all ranks", (
        "tests/ranks/test_out_of_memory.py::test_every_rank_reads_the_table_and_advice_that_fits",
    )),
    "F10": Row("data that end earlier on one rank", "one clear error", (
        f"{DATA}::test_data_that_ends_earlier_on_one_rank_is_told_at_once",
    )),
    "F11": Row("SIGABRT of a stage", "all name it", (ENDED,)),
    "F12": Row("Python's lock held for 10 s", "named after step_timeout", (
        f"{UNITS}::test_a_rank_that_holds_pythons_lock_is_named",
    )),
    "F13": Row("exception, kill in `setup`", "all end, cause named", (
        IN_HOOK, f"{MATRIX}::test_a_killed_rank_is_named",
        f"{MATRIX}::test_a_callback_that_fails_to_set_up_on_one_rank_is_told_by_all",
    )),
    "F14": Row("exception in validation on the last stage", "all end, cause named", (IN_UNIT,)),
    "F15": Row("SIGTERM to one rank anywhere", "all end at one step, with a checkpoint", (
        TERMINATED, f"{SIGTERM}::test_all_ranks_end_after_the_same_batch",
    )),
    "F16": Row("SIGTERM to all, twice", "as F15", (
        f"{MATRIX}::test_a_sigterm_to_all_ranks_and_again_ends_them_once",
    )),
    "F17": Row("SIGTERM during a save", "the save is finished", (
        TERMINATED, "tests/ranks/test_checkpoint_end.py::test_a_save_that_a_sigterm_began_is_finished",
    )),
    "F18": Row("SIGUSR1 under SLURM", "one checkpoint, queued again once", (
        "tests/ranks/test_checkpoint_requeue.py::test_a_job_that_is_to_end_saves_once_and_goes_on_there",
    )),
    "F19": Row("SIGINT to one, to all", "all end", (
        IN_UNIT, f"{UNITS}::test_what_all_ranks_do_ends_them_as_one_device",
    )),
    "F20": Row("resume after F15", "bit by bit", (
        f"{SIGTERM}::test_the_checkpoint_of_that_batch_resumes_to_the_same_weights",
    )),
    "F21": Row("other settings on one rank", "field and values, before the first step", (DIFFER,)),
    "F22": Row("another module on one rank", "the first difference, with both", (DIFFER,)),
    "F23": Row("another version on one rank", "both versions", (DIFFER,)),
    "F24": Row("fewer micro-batches than stages; batches that do not divide", "as one device", (
        f"{UNITS}::test_fewer_micro_batches_than_stages_and_batches_that_do_not_divide",
        "tests/unit/test_settings.py::test_a_wrong_setting_is_refused",
    )),
    "F25": Row("other shapes from batch to batch", "as one device", (
        f"{UNITS}::test_fewer_micro_batches_than_stages_and_batches_that_do_not_divide",
        f"{MESSAGES}::test_ranks_that_disagree_get_the_same_error_and_no_stale_data",
    )),
    "F26": Row("another precision on one rank", "both values", (DIFFER,)),
    "F27": Row("two messages swapped", "found in that step", (
        f"{MESSAGES}::test_ranks_that_disagree_get_the_same_error_and_no_stale_data",
    )),
    "F28": Row("nan on one stage", "all skip or raise, rank, stage and parameter named", (
        f"{NONFINITE}::test_a_step_that_one_stage_cannot_take_is_left_out_by_all",
        f"{NONFINITE}::test_raise_names_rank_stage_and_parameter_on_all_ranks",
    )),
    "F29": Row("inf in a gradient, in a sum over replicas, with clipping, with a scaler", "all step or skip", (
        f"{NONFINITE}::test_gradients_whose_sum_over_replicas_overflows_are_averaged",
        f"{SCALER}::test_replicas_scale_and_skip_alike",
        f"{SCALER}::test_micro_batches_accumulation_and_clipping",
    )),
    "F30": Row("SIGKILL at each point of a save", "the one before is found", (KILLED,)),
    "F31": Row("the same over an existing name", "the old or the new", (KILLED,)),
    "F32": Row("a full disk", "rank, file and room on all ranks", (
        f"{DISK}::test_a_full_disk_is_told_on_every_rank", WRITE,
    )),
    "F33": Row("no permission; an exception that cannot be pickled", "the cause on all ranks", (
        f"{DISK}::test_a_read_only_folder_is_told_on_every_rank", WRITE,
    )),
    "F34": Row("an error in the writing thread", "the save fails", (WRITE,)),
    "F35": Row("a rank that hangs in a save", "named after checkpoint_timeout", (
        f"{BEHIND}::test_a_writer_that_hangs_is_named_on_every_rank",
    )),
    "F36": Row("a save in the background that fails", "raised", (
        f"{LIGHTNING}::test_a_failure_in_the_background_is_raised",
    )),
    "F37": Row("SIGKILL during a save in the background", "the old or the new", (
        f"{BEHIND}::test_a_kill_during_a_save_in_the_background_leaves_the_old_or_the_new",
    )),
    "F38": Row("one name on two stages", "refused before writing", (
        f"{SAVES}::test_one_key_on_two_stages_is_refused_before_writing",
        "tests/ranks/test_checkpoint_states.py"
        "::test_a_weight_that_one_rank_sets_is_stored_and_one_that_two_set_differently_is_refused",
    )),
    "F39": Row("objects of each rank", "each gets its own back", (
        RESHARDED, "tests/ranks/test_checkpoint_settings.py::test_state_of_callbacks_and_data_comes_back_on_every_rank",
    )),
    "F40": Row("files deleted, cut, flipped, zeroed, swapped", "file named, nothing touched", (
        f"{DAMAGED}::test_damaged_files_are_named", f"{DAMAGED}::test_a_zeroed_page_is_found_in_every_file",
    )),
    "F41": Row("200 random byte flips", "none is silent", (f"{DAMAGED}::test_none_of_200_byte_flips_loads",)),
    "F42": Row("other stages and schedules", "bit by bit", (
        RESHARDED, "tests/ranks/test_checkpoint_resume.py::test_hops_between_layouts_keep_every_bit",
    )),
    "F43": Row("layers missing or too many, other data types", "all keys listed", (
        f"{DAMAGED}::test_misfits_are_listed_together", f"{DAMAGED}::test_another_data_type_is_a_misfit",
    )),
    "F44": Row("files that run code or lead elsewhere", "no code is run", (
        f"{HOSTILE}::test_code_in_the_metadata_does_not_run", f"{HOSTILE}::test_code_in_meta_does_not_run",
        f"{HOSTILE}::test_code_in_an_object_entry_does_not_run",
        f"{HOSTILE}::test_paths_out_of_the_folder_are_not_followed",
    )),
    "F45": Row("a file that one rank sees otherwise", "refused by all", (
        f"{LOADING}::test_a_file_that_one_rank_sees_otherwise_is_refused_by_all",
    )),
    "F46": Row("another format", "a clear error", (f"{HOSTILE}::test_a_manifest_of_other_types_is_refused",)),
    "B0": Row("a resume of a resume, around the ends of epochs", "bit by bit", (
        CHAIN, "tests/ranks/test_same_data.py::test_a_resumed_run_takes_nothing_from_a_stream",
    )),
    "B1": Row("rank 0 stopped, cut off or gone", "noticed like any other", (
        STOPPED, f"{MATRIX}::test_a_lost_rank_0_ends_the_wait_for_a_metric",
        f"{LINK}::test_ranks_that_are_cut_off_name_each_other",
        f"{START}::test_a_rank_that_is_lost_while_torch_makes_the_group_is_named",
    )),
    "B2": Row("a rank stuck outside of messages; before there are groups; in its last hook", "the true one named", (
        STOPPED, f"{START}::test_a_rank_that_never_comes_is_named_after_init_timeout",
        f"{START}::test_a_rank_that_is_lost_while_more_groups_are_made_is_named",
        f"{START}::test_a_rank_that_is_killed_before_the_device_mesh_is_named",
        f"{MATRIX}::test_a_rank_that_is_busy_in_a_hook_has_hook_timeout",
    )),
    "B3": Row("callbacks that upload before the others are told", "the others end first", (UPLOAD,)),
    "B4": Row("SIGTERM in validation", "all end alike, with a checkpoint", (
        TERMINATED, f"{SIGTERM}::test_an_evaluation_ends_on_every_rank_alike",
    )),
    "B5": Row("code and numbers that differ between ranks", "named with both values", (
        DIFFER, f"{AGREE}::test_paths_loggers_and_callbacks_that_wait_for_nobody_may_differ",
    )),
    "B6": Row("a loader's worker is killed", "the failure of its own rank", (
        f"{DATA}::test_a_killed_worker_of_a_loader_is_its_own_ranks_failure",
    )),
    "B7": Row("a manifest that is a pipe or a device", "not opened", (
        f"{HOSTILE}::test_a_manifest_that_is_a_pipe_or_a_device_is_not_opened",
    )),
    "B8": Row("loaders without a length that end apart", "said at once", (
        f"{DATA}::test_data_that_ends_earlier_on_one_rank_is_told_at_once",
    )),
    "B9": Row("exit codes", "1 after a failure, 0 after SIGTERM, as docs/troubleshooting.md has it", (
        ENDED, IN_UNIT, TERMINATED,
    )),
    "B10": Row("manifests and meta files made by hand", "our errors, nothing touched", (
        f"{HOSTILE}::test_a_manifest_of_other_types_is_refused",
        f"{HOSTILE}::test_a_manifest_that_nests_without_end_is_refused",
        f"{HOSTILE}::test_a_name_with_a_null_is_refused",
        f"{HOSTILE}::test_a_meta_file_of_other_types_is_refused_before_anything_is_touched",
        f"{HOSTILE}::test_a_file_that_the_manifest_does_not_list_is_not_read",
    )),
    "B11": Row('`schedule="ZBV", stages_per_rank=2`', "accepted", (
        "tests/unit/test_settings.py::test_a_schedule_of_two_stages_takes_that_number",
    )),
    "B12": Row("StopIteration in a forward, in a hook", "an error of that rank", (
        f"{MATRIX}::test_stop_iteration_in_a_forward_is_an_error_of_that_rank",
        f"{MATRIX}::test_an_end_of_data_that_a_hook_raises_on_one_rank_is_named",
    )),
    "B13": Row("a rank that dies outside of a step; a metric that one rank asks for", "named", (
        f"{MATRIX}::test_a_killed_rank_is_named", IN_HOOK,
        f"{MATRIX}::test_a_rank_that_is_killed_in_its_last_hook_is_named",
        f"{MATRIX}::test_a_metric_that_one_rank_asks_for_alone_is_named",
    )),
    "B14": Row("compressed checkpoint files", "refused before they are opened", (
        f"{HOSTILE}::test_compressed_entries_are_refused",
    )),
}  # fmt: skip
