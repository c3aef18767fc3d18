"""Which tests see what a key of the config governs change.

A key is a dotted name of some task's schema, or a pattern of such names. The tests set it to another value
than its default, or compare what it governs under several values. Keys whose effect a function shows alone
are in tests/config/test_keys_govern.py.
"""

from __future__ import annotations

from collections.abc import Mapping

GOVERNED: Mapping[str, tuple[str, ...]] = {
    "name": ("record/test_rundir.py::test_a_new_run_gets_a_folder_with_an_id_of_its_own",),
    "preset": ("config/test_load.py::test_an_option_can_choose_the_preset",),
    "sizes": ("config/test_growing_presets.py::test_sizes_may_be_given",),
    "device": ("distributed/test_rank_count.py::test_a_device_that_is_not_there_is_named",),
    "precision": ("run/test_trainer.py::test_lower_precision_follows_the_fp32_curve",),
    "tf32": ("gpu/test_pretended.py::test_float32_matrices_are_multiplied_as_the_config_says",),
    "compile": ("run/test_sharded.py::test_blocks_are_compiled_each_and_share_a_graph",),
    "compile_stages": (
        "run/test_compile_stages.py::test_nothing_is_compiled_unless_it_is_asked_for",
    ),
    "reproducible": ("run/test_sharded.py::test_elastic_runs_are_one_run_bit_for_bit",),
    "task": ("run/test_precision.py::test_other_tasks_keep_fp32_unless_told",),
    "schedule": (
        "run/test_changes.py::test_a_schedule_for_earlier_orchestrators_runs_as_it_stands",
    ),
    "resume": ("cli/test_resume.py::test_automatic_begins_a_run_and_then_goes_on_with_it",),
    "model.from": ("cli/test_from_weights.py::test_ranks_and_growth_start_from_a_run",),
    "model.config": (
        "growth/test_upscaling.py::test_a_scaled_context_is_what_transformers_makes_of_its_config",
    ),
    "model.adapter": ("models/test_peft.py::test_adapters_of_a_run_go_to_peft_and_come_back",),
    "model.mask": (
        "extensions/graphs/test_spec.py::test_one_graph_may_be_in_every_split_with_a_mask_of_each",
    ),
    "model.max_nodes": ("extensions/graphs/test_survey.py::test_all_mistakes_are_told_at_once",),
    "data.path": ("data/test_tokens.py::test_nothing_is_visible_after_a_failure",),
    "data.seed": ("run/test_preflight.py::test_samples_are_divided_by_the_seed_of_the_data",),
    "data.strategy": (
        "run/test_diloco.py::test_every_sample_is_taken_once_and_in_order_on_any_ranks_and_with_any_strategy",
    ),
    "data.workers": ("data/test_dataset.py::test_workers_change_nothing",),
    "data.transform": (
        "data/test_transform.py::test_a_function_in_the_current_directory_is_found",
    ),
    "data.drop_last": ("run/test_drop_last.py::test_an_epoch_without_a_whole_batch_is_refused",),
    "data.prefetch": (
        "data/test_loader.py::test_without_prefetch_steps_are_read_where_they_are_taken",
    ),
    "data.kind": ("cli/test_data.py::test_rows_become_token_shards",),
    "data.source": ("data/test_changed_sources.py::test_a_source_that_is_gone_is_mentioned",),
    "data.subset": ("data/test_hf.py::test_a_subset_is_chosen_by_name",),
    "data.source_split": ("data/test_hf.py::test_another_split_and_a_share_of_one",),
    "data.mixture": ("data/test_dataset.py::test_every_way_brings_the_same_global_batches",),
    "data.val_source": (
        "data/test_prepare.py::test_what_is_held_out_may_have_a_source_of_its_own",
    ),
    "data.text_field": ("data/test_hf.py::test_what_the_rows_do_not_have_is_named",),
    "data.tokens_field": ("data/test_hf.py::test_lists_of_ids_are_read_too",),
    "data.bos": (
        "data/test_surroundings.py::test_documents_begin_and_end_with_the_tokens_of_the_config",
    ),
    "data.eos": (
        "data/test_surroundings.py::test_documents_begin_and_end_with_the_tokens_of_the_config",
    ),
    "data.chat_form": (
        "data/test_chat_forms.py::test_conversations_of_any_form_become_the_same_samples",
    ),
    "data.chat_answers": (
        "data/test_chat_forms.py::test_only_the_last_answer_is_trained_where_the_config_says_so",
    ),
    "data.if_changed": (
        "data/test_changed_sources.py::test_what_was_prepared_is_kept_on_demand_and_said",
    ),
    "data.tokenizer": ("models/test_hf_folder.py::test_the_tokenizer_goes_along_and_comes_back",),
    "data.vocab_size": (
        "run/test_preflight.py::test_seeds_share_tokenizer_and_held_out_text_where_the_data_have_a_seed",
    ),
    "data.max_bytes": ("data/test_prepare.py::test_max_bytes_takes_whole_documents_from_all_over",),
    "data.drop_duplicates": (
        "data/test_prepare.py::test_documents_that_leak_between_splits_are_counted_and_one_key_removes_them",
    ),
    "data.*_fraction": ("data/test_prepare.py::test_one_document_is_split_by_position",),
    "data.chat_template": (
        "data/test_chat.py::test_a_template_without_generation_marks_what_the_assistant_adds",
    ),
    "data.context": (
        "run/test_ramps.py::test_evaluations_follow_the_training_samples_unless_told_otherwise",
    ),
    "data.packing": ("data/test_seek_points.py::test_points_hold_for_any_context",),
    "eval.sets": ("run/test_eval_sets.py::test_sets_and_parts_have_the_losses_of_their_texts",),
    "data.document_masks": (
        "run/test_document_masks.py::test_a_run_evaluates_documents_alone_on_any_ranks",
    ),
    "data.lanes": ("data/test_iterable.py::test_a_folder_of_save_to_disk_is_a_stream_of_lanes",),
    "data.val": ("data/test_split.py::test_sizes_that_cannot_be",),
    "data.test": ("data/test_split.py::test_sizes_that_cannot_be",),
    "data.fold": ("data/test_folds.py::test_a_test_set_of_ones_own_is_in_no_fold",),
    "data.folds": ("data/test_folds.py::test_a_test_set_of_ones_own_is_in_no_fold",),
    "data.stratify": ("extensions/graphs/test_spec.py::test_classes_are_in_all_splits_alike",),
    "data.balance": ("data/test_sampling.py::test_classes_come_equally_often",),
    "data.train_subset": (
        "data/test_subset.py::test_a_subset_is_of_the_training_split_and_held_out_samples_stay",
    ),
    "data.sample_weights": (
        "data/test_sampling.py::test_draws_have_the_distribution_of_torchs_sampler",
    ),
    "data.causal_sets.*": (
        "extensions/graphs/test_spec.py::test_causal_sets_are_made_once",
        "extensions/graphs/test_causal_sets.py::test_columns_say_what_the_order_says",
    ),
    "train.max_skipped_steps": (
        "run/test_trainer.py::test_a_non_finite_gradient_is_skipped_and_the_weights_are_kept",
    ),
    "train.gradient_checkpointing": (
        "schedule/test_forecast.py::test_memory_follows_the_settings",
    ),
    "optimizer.lr_base_width": (
        "run/test_own_optimizer.py::test_rates_follow_the_width_only_of_a_model_with_one_and_under_known_optimizers",
    ),
    "optimizer.lr_base_depth": (
        "run/test_own_optimizer.py::test_rates_follow_the_depth_only_of_a_model_with_blocks_and_not_under_sgd",
    ),
    "learning_rate.plateau.*": (
        "run/test_early_stopping_rule.py::test_the_rate_falls_where_that_of_torch_does",
        "run/test_early_stopping.py::test_the_rate_falls_to_its_floor_and_no_further",
        "run/test_early_stopping_rule.py::test_a_metric_that_never_improves_ends_it_after_grace_and_patience",
    ),
    "eval.eval_epochs": ("run/test_evaluate.py::test_evaluations_by_epochs_are_at_their_ends",),
    "eval.batch_size": (
        "run/test_evaluate.py::test_the_subset_is_the_same_whatever_the_batch_size_becomes",
    ),
    "eval.context": (
        "run/test_ramps.py::test_evaluations_follow_the_training_samples_unless_told_otherwise",
    ),
    "early_stopping.rules": (
        "run/test_early_stopping.py::test_a_trainer_gives_and_takes_it_up_with_its_state",
    ),
    "early_stopping.stop_when": (
        "run/test_early_stopping.py::test_a_run_is_given_up_where_one_or_all_stand_still",
    ),
    "test.weights": (
        "run/test_test_phase.py::test_the_last_weights_are_tested_where_the_config_says_so",
    ),
    "test.predictions": (
        "run/test_test_phase.py::test_predictions_are_not_written_where_nobody_wants_them",
    ),
    "record.noise_every": (
        "run/test_ramps.py::test_measuring_the_noise_changes_no_bit_of_training",
    ),
    "record.sample_*": (
        "run/test_inspection.py::test_a_model_writes_at_evaluations_and_at_the_end",
    ),
    "record.out_dir": (
        "record/test_rundir.py::test_a_folder_in_which_no_run_can_be_made_is_refused",
    ),
    "record.run_dir": ("run/test_preflight.py::test_a_run_directory_that_is_a_file",),
    "record.trackers.*": (
        "record/trackers/test_configured.py::test_empty_braces_choose_the_defaults",
    ),
    "record.alerts.divergence": (
        "record/test_alerts.py::test_a_rule_that_is_switched_off_says_nothing",
    ),
    "record.alerts.stall": ("record/test_alerts.py::test_a_stall_is_told_once_until_it_is_over",),
    "record.alerts.nan_skips": ("record/test_alerts.py::test_skips_in_a_row_are_told_once",),
    "record.alerts.command": (
        "record/trackers/test_configured.py::test_a_command_may_be_a_line_or_a_list",
    ),
    "record.alerts.webhook": (
        "record/trackers/test_configured.py::test_nobody_to_be_told_is_a_mistake",
    ),
    "checkpoint.every_minutes": (
        "run/test_saving.py::test_rank_0s_clock_says_when_minutes_have_passed",
    ),
    "checkpoint.every_epochs": (
        "run/test_saving.py::test_it_is_saved_at_the_ends_of_epochs_whatever_the_batch",
    ),
    "checkpoint.best_of": (
        "run/test_saving.py::test_the_first_metric_of_best_of_decides_which_checkpoints_stay",
    ),
    "checkpoint.on_growth": ("extensions/delta/test_saver.py::test_growth_starts_an_anchor",),
    "checkpoint.asynchronous": (
        "extensions/delta/test_saver.py::test_no_checkpoint_is_published_before_the_deltas_that_it_covers",
    ),
    "checkpoint.save_*_state": (
        "cli/test_resume.py::test_what_was_left_out_is_said_with_what_it_costs",
    ),
    "parallel.world_size": (
        "distributed/test_rank_count.py::test_more_ranks_than_any_machine_runs_are_not_started",
    ),
    "parallel.devices": (
        "distributed/test_rank_count.py::test_fewer_devices_than_ranks_are_refused",
    ),
    "parallel.master_*": (
        "distributed/test_placement.py::test_the_config_says_where_to_meet_if_the_environment_does_not",
    ),
    "parallel.backend": ("distributed/test_world.py::test_nccl_needs_a_gpu",),
    "parallel.timeout_s": (
        "run/test_diloco.py::test_a_run_that_was_killed_and_one_that_was_stopped_end_as_the_undisturbed_one",
    ),
    "parallel.silence_s": (
        "run/test_diloco.py::test_a_rank_that_dies_or_freezes_in_a_round_is_named",
    ),
    "parallel.strategy": (
        "run/test_collectives.py::test_other_strategies_send_as_often_as_their_pages_say",
    ),
    "parallel.ddp.*": ("config/test_keys_govern.py::test_each_option_reaches_ddp",),
    "parallel.ddp.exchange": (
        "run/test_collectives.py::test_gradients_travel_in_half_as_many_bytes",
    ),
    "parallel.fsdp.shards": (
        "run/test_sharded.py::test_what_cannot_be_sharded_is_refused_before_the_start",
    ),
    "parallel.fsdp.reshard_after_forward": (
        "run/test_collectives.py::test_other_strategies_send_as_often_as_their_pages_say",
    ),
    "parallel.fsdp.gather": (
        "run/test_sharded.py::test_auto_shards_where_the_whole_model_does_not_fit",
    ),
    "parallel.fsdp.offload": (
        "run/test_preflight.py::test_what_a_host_cannot_hold_for_its_gpus_is_refused",
    ),
    "parallel.fsdp.reduce_each_micro_batch": (
        "run/test_sharded.py::test_several_micro_batches_keep_whole_gradients_unless_each_is_reduced",
    ),
    "parallel.diloco.sync_every": (
        "run/test_collectives.py::test_local_steps_send_nothing_before_their_round_ends",
    ),
    "parallel.diloco.outer_*": ("run/test_diloco.py::test_the_outer_optimizer_is_torchs_sgd",),
    "parallel.diloco.exchange": (
        "run/test_diloco.py::test_a_run_that_was_killed_and_one_that_was_stopped_end_as_the_undisturbed_one",
    ),
    "parallel.elastic.virtual_ranks": (
        "run/test_elastic.py::test_more_virtual_ranks_are_another_run",
    ),
    "parallel.elastic.threads": (
        "run/test_elastic.py::test_what_the_environment_says_of_threads_does_not_matter",
    ),
}
