"""Which of Lightning's own tests are not about two stages, and why: by what they fail with, or by name."""

import re

_BY_REASON = {
    "a module with one layer": (r"the model has 1 unit to share out",),
    "refused by design": (
        r"takes dataloader_iter",
        r"it overrides backward",
        r"LBFGS runs the step several times per batch",
    ),
    "a test's own affair": (
        r"Test left artifacts behind: .*'crash",
    ),  # our report of an error, where it runs
}
_OF_RANK_1 = (r"DID NOT WARN", r"in ''\) is True", r"^AssertionError$")
"""Fails on rank 1 alone: warnings, lines of the log and progress bars are rank 0's."""
_BY_NAME = {
    "refused by design": (
        # An exception inside a step: nothing is saved, for the ranks stand at different places.
        r"test_loop_restart_progress_multiple_dataloaders",
        r"test_loop_state_on_exception",
        # The module of a run that failed is used again, and has lost the weights of other stages.
        r"test_invalid_dataloader_idx_raises_batch_(start|end)",
        # The step asserts what `on_train_start` sets, and is traced before.
        r"test_params_groups_and_state_are_accessible",
    ),
    "about one process": (
        # Predictions are on the last stage, that of rank 0.
        r"test_prediction_loop_(stores_predictions|with_iterable_dataset)",
        # Rank 1 warns of nothing, leaves the test, and rank 0 waits for it.
        r"test_resume_mid_epoch_warning",
        r"test_train_step_no_return$",
        r"test_training_step_no_return_when_even",
        # `prepare_data` is called on local rank 0.
        r"test_datamodule_hooks_are_profiled",
        r"test_trainer_datamodule_hook_system",
    ),
    "a test's own affair": (
        r"test_skip_training_step_not_allowed\[2\]",  # asks that several ranks refuse what is served here
        r"test_result_collection_reload",  # the step reads `fit_loop._results`, a private of Lightning's
        # They restore with `trainer._checkpoint_connector`, a private of Lightning's, when the run is over.
        r"test_dm_checkpoint_save_and_load",
        r"test_cpu\.py::test_(early_stopping_cpu_model|cpu_model|all_features_cpu_model)",
        # A resume in mid-epoch goes on with the next batch here.
        r"test_fit_loop_save_and_restore_dataloaders\[<lambda>-False-batches_before2-batches_after2\]",
    ),
}


def excluded(test: str, reason: str, *, rank_0_passes: bool = False) -> str:
    """Why a test that fails on two stages is not counted; empty where it is.

    Args:
        test: Its name.
        reason: The first line of what it fails with.
        rank_0_passes: Whether it fails on the other rank alone.
    """
    for kind, patterns in _BY_REASON.items():
        if any(re.search(pattern, reason) for pattern in patterns):
            return kind
    if rank_0_passes and any(re.search(pattern, reason) for pattern in _OF_RANK_1):
        return "about one process"
    return next((k for k, names in _BY_NAME.items() if any(re.search(name, test) for name in names)), "")
