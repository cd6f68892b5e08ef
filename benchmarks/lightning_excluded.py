"""Which of Lightning's own tests are not about two stages, and why: by what they fail with, or by name."""

import re

_BY_REASON = {
    "a module with one layer": (r"the model has 1 unit to share out",),
    "refused by design": (
        r"takes dataloader_iter",
        r"LBFGS runs the step several times per batch",
        r"is remote, and a checkpoint folder is made complete by renaming it",
        r"callback \w+ gives parameters other names in mid-run",
        r"callback \w+ tries sizes until one rank is out of memory",
        r"^lightning_pipeline\.errors\.UnsafeCheckpointError",
    ),
    "a test's own affair": (
        r"Test left artifacts behind: .*'crash",  # our report of an error, where it runs
        r"KeyError: 'SLURM_NODEID'",  # some of SLURM's variables are set by hand, and this one is not
        # No run: loaders, or what restores a checkpoint, are called by hand, privates of Lightning's.
        r"^RuntimeError: \S+ is not attached to a `Trainer`",
        r"ConfigurationError: no run is under way, or its module is not split yet",
    ),
}
_OF_RANK_1 = (
    # What the step on the last stage raises, the other rank tells in an error of its own class.
    r"^lightning_pipeline\.errors\.StageFailedError: pipeline rank 0 stopped in .* because pipeline rank 1",
    r"assert 0 > 0 \+ where 0 = <MagicMock", r"^AssertionError: assert \[\] == \[call\(", r"in 'INFO ",
    r"Expected training metrics to be logged", r"Expected exactly one warning about missing",
    r"DID NOT WARN", r"in ''\) is True", r"^AssertionError$", r"in '' \+ where '' = .*LogCaptureFixture",
)  # fmt: skip
"""Fails on rank 1 alone: warnings, lines of the log and progress bars are rank 0's."""
_RANK_1_LEAVES = (
    r"progress/test_\w+\.py::",  # bars are rank 0's
    r"callbacks/test_prediction_writer\.py::",  # writers run where the predictions are
    r"test_hparams_pickle_warning",  # so are warnings
    # So is what loggers write, and a version that their service gives.
    r"loggers/test_all\.py::test_loggers_fit_test_all\[CometLogger\]",
    r"loggers/test_logger\.py::test_(custom_logger|multiple_loggers|multiple_loggers_pickle)$",
    r"loggers/test_litlogger\.py::test_litlogger_with_trainer",
    r"loggers/test_mlflow\.py::test_mlflow_log_(model\[(all|True)\]|dir)$",
    r"loggers/test_wandb\.py::test_wandb_(log_model|log_model_with_score|logger_dirs_creation|pickle)$",
)
"""Rank 1 fails, for it has no such thing, and rank 0 passes, or waits for it at the start of its next run."""
_WAITS = r"has not come to the start of the run"
_BY_NAME = {
    # pytest tells of the warning that it looks for, and not of the error that came before.
    "a module with one layer": (r"test_finetuning_callback_warning",),
    "refused by design": (
        # BatchSizeFinder: pytest tells of the warning that it looks for, and not of the refusal before it.
        r"test_auto_scale_batch_size_duplicate_attribute_warning",
        # An exception inside a step: nothing is saved, for the ranks stand at different places.
        r"test_loop_restart_progress_multiple_dataloaders",
        r"test_loop_state_on_exception",
        # The module of a run that failed is used again, and has lost the weights of other stages.
        r"test_invalid_dataloader_idx_raises_batch_(start|end)",
        r"test_trainer\.py::test_(on_exception_hook|error_handling_all_stages)",
        r"test_lr_scheduler_strict\[True\]",
        r"test_lambda_function\.py::test_lambda_call",
        r"test_model_checkpoint_on_exception_parametrized\[TroubledModelIn(Training|Validation)Step\]",
        r"test_restarting_mid_epoch_raises_warning\[(Exception|ShouldStop)Model-True\]",
        # Once the ranks have left, after the last batch, there is no checkpoint of an exception.
        r"test_model_checkpoint_on_exception_(parametrized|in_other_callbacks)\[Troubled(Model|Callback)OnFitEnd\]",
        # Loaders are asked for in the setup, so that a first batch is there, before `configure_optimizers`.
        r"test_trainer_model_hook_system_(fit|eval|predict)",
    ),
    "about one process": (
        # Predictions are on the last stage, that of rank 0.
        r"test_prediction_loop_(stores_predictions|with_iterable_dataset)",
        r"test_trainer\.py::test_(predict_return_predictions_cpu|trainer_predict_cpu|trainer_predict_grad)",
        # So is what a step returns to hooks, and what it leaves in lists for the hooks at an epoch's end.
        r"test_callback_hook_outputs\.py::test_train_step_no_return",
        r"test_eval_logging_auto_reduce",
        # So are `log_hyperparams` and warnings.
        r"test_validation_step_log_with_tensorboard",
        r"test_resume_incomplete_callbacks_list_warning",
        r"test_skip_on_fast_dev_run_tuner",
        # Lightning runs without inference mode where processes talk over gloo.
        r"test_eval_inference_mode",
        # Lightning writes the rank into the names of a profile's files where there are several.
        r"test_pytorch_profiler_trainer\[",
        r"test_simple_profiler_(dirpath|with_nonexisting)",
        # Rank 0's log lines, counted.
        r"test_simple_profiler_logs",
        r"test_trainer_min_steps_and_min_epochs_not_reached",
        # Rank 0 alone calls `CheckpointIO`, as with DDP; rank 1 leaves the test, and rank 0 waits for it.
        r"test_trainer_save_checkpoint_storage_options",
        # Four CPUs are said to be there: enough to warn one process of few workers, and not two.
        r"test_warning_with_few_workers",
        # They ask for one device, or for `SingleDeviceStrategy` by its type or in a profile.
        r"test_trainer_config_(device_ids|strategy)\[",
        r"test_accelerator_connector\.py::test_(accelerator_cpu_with|devices_auto|connector_auto)_",
        r"test_pytorch_profiler_trainer_fit",
        # Rank 1 warns of nothing, leaves the test, and rank 0 waits for it.
        r"test_resume_mid_epoch_warning",
        r"test_warning_with_iterable_dataset_and_len",
        r"test_train_step_no_return$",
        r"test_training_step_no_return_when_even",
        # Rank 1 tells what the last stage raised in an error of its own class, and leaves the test.
        r"test_logging_raises",
        # `prepare_data` is called on local rank 0.
        r"test_datamodule_hooks_are_profiled",
        r"test_trainer_datamodule_hook_system",
        # Rank 1 sees no line of the log, leaves the test, and rank 0 waits for it.
        r"test_timer\.py::test_trainer_flag",
        # Two ranks have rates of all devices, beside a device's.
        r"test_throughput_monitor_eval",
    ),
    "a test's own affair": (
        r"test_skip_training_step_not_allowed\[2\]",  # asks that several ranks refuse what is served here
        r"test_result_collection_reload",  # the step reads `fit_loop._results`, a private of Lightning's
        # They restore with `trainer._checkpoint_connector`, a private of Lightning's, when the run is over.
        r"test_dm_checkpoint_save_and_load",
        r"test_cpu\.py::test_(early_stopping_cpu_model|cpu_model|all_features_cpu_model)",
        r"test_model_checkpoint_only_weights",
        # No run: they call `strategy.connect` and the data connector, a private of Lightning's, by hand.
        r"test_limit_batches\.py::test_eval_limit_batches",
        r"test_num_stepping_batches_(basic|raises_info_with|iterable_dataset|accumulate_gradients)",
        r"test_optimizer_return_options",
        r"test_dataloaders_are_not_loaded_if_disabled_through_limit_batches",
        # Both processes write the checkpoint that both read.
        r"test_migrate_loop_batches_that_stepped",
        r"test_load_past_checkpoint\[module_arguments\]",
        r"test_load_from_checkpoint_warn_on_empty_state_dict",
        # They set the clock (`time.monotonic`) that every wait for another rank reads.
        r"test_throughput_monitor_(fit|fit_with_validation|fit_gradient_accumulation|variable_batch_size|validation_with_many_epochs)(\[|$)",
        r"test_time_based_val_check_interval",
        r"test_time_and_epoch_gated_val_check",
        # Their callbacks are mocks, whose every attribute is one, and cannot be compared over ranks.
        r"test_callbacks\.py::test_(callbacks_configured_in_model|configure_callbacks_hook_multiple_calls)",
        # It names the class of `BoringModel.layer`, which is made of two here.
        r"test_custom_model_summary_callback_summarize",
        # They count calls of `Tensor.backward`, which no stage calls: each runs its part of it.
        r"test_backward_count_(simple|with_grad_accumulation)",
        r"test_stateful_trainer_ckpt_path_support",
        # `torch.save` is a mock that writes nothing, and ranks put together what they have written.
        r"test_checkpoint_callback_frequency\.py::test_(default_checkpoint_freq|top_k)\[",
        # `load_state_dict` is a mock; each stage loads its own part.
        r"test_strict_loading\[",
        # Both processes call a ModelCheckpoint by hand in one folder, with no run around it.
        r"test_model_checkpoint_options",
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
    leaves = any(re.search(name, test) for name in _RANK_1_LEAVES)
    if leaves and (rank_0_passes or re.search(_WAITS, reason)):
        return "about one process"
    return next((k for k, names in _BY_NAME.items() if any(re.search(name, test) for name in names)), "")
