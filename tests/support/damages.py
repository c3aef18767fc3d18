"""Which test damages what a message says was checked.

A message is a text of the source, the help of a command, or a sentence of the documentation, with one of
the words exact, intact, whole, equal, tested or verified. Each must be claimed by a row: of `CHECKS`, with the
tests that damage what the check looks at and see it fail, or of `NO_CHECKS`, with the other thing that the
word means there.
"""

from __future__ import annotations

from typing import NamedTuple

CHECKPOINT = (
    "checkpoint/test_store.py::test_every_fault_in_every_file_is_found_and_named",
    "checkpoint/test_store.py::test_no_bit_of_a_manifest_can_flip_unseen",
    "torture/test_damaged_files.py::test_every_damage_to_every_file_is_found_and_named",
)
FALLBACK = (
    "cli/test_resume.py::test_it_walks_back_past_a_broken_one_and_says_so",
    "cli/test_checkpoint.py::test_verify_names_every_broken_file_and_what_is_left",
    "cli/test_checkpoint.py::test_verify_of_a_run_whose_checkpoints_are_all_broken",
    "cli/test_checkpoint.py::test_verify_of_a_run_names_pointers_that_lead_nowhere",
)
DELTA = (
    "extensions/delta/test_chain.py::test_any_flipped_byte_is_found_and_its_file_named",
    "extensions/delta/test_chain.py::test_every_damage_to_the_chain_is_named",
    "extensions/delta/test_cli.py::test_a_damaged_chain_ends_in_3",
    "extensions/delta/test_saver.py::test_a_chain_that_ends_before_the_latest_checkpoint_is_not_said_to_be_whole",
)
TOKENS = (
    "cli/test_data.py::test_verify_finds_a_flipped_bit",
    "data/test_tokens.py::test_a_flipped_bit_is_found_by_verifying",
    "data/test_tokens.py::test_a_shard_is_verified_once_after_each_change",
)
PROOF = (
    "growth/test_proof.py::test_an_exact_one_may_move_logits_by_rounding_alone",
    "growth/test_proof.py::test_what_is_not_finite_never_holds",
)
LIVE = (
    *PROOF,
    "run/test_changes.py::test_a_model_that_is_not_what_it_was_meant_to_be_is_not_used",
    "run/test_damaged_growth.py::test_every_tensor_that_will_train_is_compared_with_the_plan",
    "run/test_damaged_growth.py::test_every_tensor_that_float64_stood_for_is_compared_with_it",
    "run/test_damaged_growth.py::test_a_damaged_candidate_leaves_the_run_as_it_was",
    "run/test_damaged_growth.py::test_buffers_are_compared_with_the_plan_too",
)
ANYWHERE = (
    *PROOF,
    "growth/test_grow.py::test_a_growth_that_breaks_its_label_changes_nothing",
    "growth/test_damaged.py::test_a_damaged_module_does_not_take_the_old_ones_place",
    "growth/test_damaged.py::test_buffers_and_averages_are_compared_too",
    "growth/test_damaged.py::test_a_check_sees_each_damage_that_it_is_given",
    "growth/test_damaged.py::test_outputs_that_are_not_finite_never_pass",
)
FOLDERS = (
    *PROOF,
    "growth/test_folders.py::test_what_breaks_its_label_is_not_written",
    "growth/test_damaged.py::test_a_folder_that_was_written_wrongly_is_not_published",
)
OFFLINE = (
    *PROOF,
    "run/test_grow.py::test_weights_that_prove_nothing_make_nothing",
    "run/test_grow.py::test_a_file_that_was_written_wrongly_makes_nothing",
)
REPLICAS = (
    "distributed/test_saving_together.py::"
    "test_replicas_that_differ_are_refused_on_all_ranks_before_anything_is_written",
    "distributed/test_saving_together.py::test_replicas_of_shards_that_differ_are_refused_too",
    "distributed/test_saving_together.py::"
    "test_any_difference_in_any_tensor_of_any_component_is_found_and_named",
)
TEST_PHASE = (
    "run/test_test_phase.py::test_the_best_weights_are_tested_though_the_last_are_worse",
    "run/test_test_phase.py::test_any_number_of_ranks_tests_every_sample_once_and_alike",
    "cli/test_test.py::test_a_result_of_other_weights_of_the_same_step_is_not_kept",
)
DELTA_KILLED = (
    "torture/test_killed_deltas.py::test_sigkill_leaves_a_chain_that_holds_every_acknowledged_link",
    "torture/test_delta.py::"
    "test_a_chain_whose_writer_is_killed_is_whole_to_its_last_acknowledged_state",
)
PUBLISHED = ("checkpoint/test_store.py::test_a_crash_at_any_call_leaves_the_old_or_the_new",)
POWER = ("torture/test_power_loss.py::test_the_replay_finds_what_a_missing_sync_would_do",)
TOKEN = (
    "extensions/board/test_server.py::test_a_token_is_asked_for_in_the_address_once_then_in_a_cookie",
)
RECORD = ("logs/test_record.py::test_a_line_that_is_no_event_is_passed_over_and_told_of",)
KILLED = (
    "torture/test_killed_runs.py::test_killed_runs_end_bit_for_bit_as_the_undisturbed_one",
    "torture/test_killed_growth.py::"
    "test_a_run_killed_while_it_changes_ends_bit_for_bit_as_the_undisturbed_one",
)


class Check(NamedTuple):
    where: str
    """pattern of the path, as of fnmatch"""
    says: str
    """regular expression, within the message"""
    tests: tuple[str, ...]


class NoCheck(NamedTuple):
    where: str
    says: str
    means: str


CHECKS = (
    Check("src/instar/checkpoint/listing.py", "no whole checkpoint in", FALLBACK),
    Check("src/instar/cli/checkpoint.py", "verified|whole", (*CHECKPOINT, *FALLBACK)),
    Check("src/instar/cli/checkpoint_output.py", "verified|whole", (*CHECKPOINT, *FALLBACK)),
    Check("src/instar/cli/train.py", "from its latest whole checkpoint", FALLBACK),
    Check("src/instar/cli/data.py", "verified|check that it is whole", TOKENS),
    Check("src/instar/extensions/delta/commands.py", "whole|intact", DELTA),
    Check("src/instar/growth/live/grow.py", "^exact$", ANYWHERE),
    Check("src/instar/growth/offline.py", "^exact$", (*FOLDERS, *OFFLINE)),
    Check("src/instar/growth/proof.py", "^exact$", PROOF),
    Check("src/instar/growth/*.py", "^exact$", (*LIVE, *ANYWHERE, *FOLDERS, *OFFLINE)),
    Check("src/instar/record/format.py", "^exact$", LIVE),
    Check("src/instar/run/changes/scheduled.py", "^exact$", LIVE),
    Check("src/instar/run/offline/grow.py", "^exact$", OFFLINE),
    Check("src/instar/extensions/board/sections.py", "^exact$", LIVE),
    Check("src/instar/run/output/run_logger.py", "tested the weights of step", TEST_PHASE),
    Check("src/instar/logs/read/lines.py", "not a whole line of JSON", RECORD),
    Check("README.md", "verified on (held-out samples|the model that will train)", LIVE),
    Check("docs/architecture.md", "carried out beside the old model, and verified", LIVE),
    Check("docs/control.md", "growth is verified as in a schedule", LIVE),
    Check("docs/first-hour.md", "the grown model was verified", LIVE),
    Check("docs/lora.md", "are exact: the model computes the same function", LIVE),
    Check("docs/architecture.md", "published before it is whole", PUBLISHED),
    Check("docs/internals.md", "Every plan has a label", (*LIVE, *ANYWHERE)),
    Check("docs/benchmarks.md", "checksums, of which all are verified in a load", CHECKPOINT),
    Check("docs/checkpoints.md", "all ranks compare hashes of the tensors", REPLICAS),
    Check("docs/checkpoints.md", "reports the newest intact checkpoint", FALLBACK),
    Check("docs/custom-task.md", "states whether the function was preserved", OFFLINE),
    Check("docs/data.md", "Token shards are verified against their checksums", TOKENS),
    Check("docs/delta.md", "a chain that is whole up to the last state", (*DELTA, *DELTA_KILLED)),
    Check("docs/growth-anywhere.md", "an operation that is labelled .exact. and changes", ANYWHERE),
    Check("docs/growth-anywhere.md", "^\\| .* exact", (*FOLDERS, *ANYWHERE)),
    Check("docs/growth-anywhere.md", "^.exact.: the logits stay", FOLDERS),
    Check("docs/growth.md", "the label is verified on held-out samples", LIVE),
    Check("docs/growth.md", "If an exact operation is measured to be inexact", LIVE),
    Check("docs/growth.md", "computes the same function, up to rounding", LIVE),
    Check("docs/graph-networks.md", "are tested on the whole test split", TEST_PHASE),
    Check("docs/reliability.md", "uses the newest intact checkpoint", FALLBACK),
    Check("docs/reliability.md", "created beside the old one and verified", LIVE),
    Check("docs/reliability.md", "final weights equal those", KILLED),
    Check("docs/reliability.md", "the chain is whole to its last acknowledged", DELTA_KILLED),
    Check("docs/reliability.md", "The test itself is tested", POWER),
    Check("docs/schedule.md", "although an exact operation was measured to be inexact", LIVE),
    Check("docs/security.md", "Before the token is verified", TOKEN),
)

NUMBER = "an integer"
PARTS = "not in parts"
SAME = "the same amount, of two things"
PROPERTY = "what something is, which nothing checks while it runs"
TRIGGER = "when a trigger is looked at"

CHECKING = (
    *("src/instar/cli/*", "src/instar/checkpoint/*", "src/instar/record/*", "src/instar/run/*"),
    *("docs/checkpoints.md", "docs/delta.md", "docs/reliability.md", "docs/security.md"),
)
"""Where checks speak: a row of `NO_CHECKS` for messages there names the file."""

NO_CHECKS = (
    NoCheck(
        "src/instar/extensions/lab/find/cli.py", "the whole learning rate schedule in small", PARTS
    ),
    NoCheck("src/instar/extensions/lab/cli.py", "at equal FLOPs", SAME),
    NoCheck("src/instar/cli/logs/*.py", "at equal steps, tokens, FLOPs or time", SAME),
    NoCheck("src/instar/cli/train.py", "on the whole test split", PARTS),
    NoCheck("src/instar/extensions/delta/callback.py", "deltas are of whole models", PARTS),
    NoCheck("src/instar/extensions/delta/replay.py", "save the new state as a whole", PARTS),
    NoCheck("src/instar/record/rundir.py", "put the whole run there", PARTS),
    NoCheck("src/instar/growth/apply.py", "will stay equal to them", SAME),
    NoCheck("docs/adding.md", "tested and grown like the built-in tasks", PROPERTY),
    NoCheck("docs/checkpoints.md", "count over the whole run|run as a whole|whole tensor", PARTS),
    NoCheck("docs/checkpoints.md", "equal to `n_head`", SAME),
    NoCheck("docs/splits.md", "only the first of equal documents is used", SAME),
    NoCheck("src/instar/config/language.py", "of documents that are equal", SAME),
    NoCheck("*", "whole[- ](number|factor)|numbers? must be whole|(low|high) to a whole", NUMBER),
    NoCheck("src/instar/config/budget.py", "are whole, got", NUMBER),
    NoCheck("*", "whole (copies|groups|lanes?|ones|windows|characters|blocks|stack|head)", PARTS),
    NoCheck(
        "*",
        "whole (learning rate|validation|evaluation|test|global|set|batch|split|run|step)",
        PARTS,
    ),
    NoCheck("*", "whole (host|node|time|tree|family|graph|budget|router|optimizer)", PARTS),
    NoCheck("*", "whole (models?|weights|tensors?|gradients|checkpoints?)", PARTS),
    NoCheck(
        "*",
        "(as a|these|read|kept|keeps?|blocks|see it|builds it) whole|a model of transformers is whole",
        PARTS,
    ),
    NoCheck("src/instar/extensions/delta/format/statistics.py", "^whole$", PARTS),
    NoCheck(
        "*", "\\bequal(ly)? (steps|tokens|FLOPs|compute|parameters|rates|seed|share|entries)", SAME
    ),
    NoCheck("*", "(stay|start|about|be|too|with|bits|are|moments?).{0,12} equal", SAME),
    NoCheck("*", "equal (values|places|moments|bits|losses|to )|equally likely|too unequal", SAME),
    NoCheck("docs/growth.md", "as in the presets, trials are equal within chance", SAME),
    NoCheck("docs/training.md", "its lines equal those of an uninterrupted run", PROPERTY),
    NoCheck("docs/grpo.md", "^\\| equal \\|", SAME),
    NoCheck(
        "*", "exact (global )?(order|answer|mean|sums|resum|metrics|definitions|copies)", PROPERTY
    ),
    NoCheck("*", "one exact|sums are exact|means are exact|\\| exact; earlier", PROPERTY),
    NoCheck(
        "docs/growth.md",
        "^-? ?(\\*\\*)?Exact\\.|is not exact|exactly|makes all four exact",
        PROPERTY,
    ),
    NoCheck("docs/growth.md", "An exact operation sets", PROPERTY),
    NoCheck(
        "src/instar/config/sections.py", "continue if an exact operation is measured", PROPERTY
    ),
    NoCheck(
        "docs/schedule.md", "tested (at evaluations|after every)|first remaining entry is", TRIGGER
    ),
    NoCheck("docs/stopping.md", "tested at evaluations", TRIGGER),
    NoCheck("docs/glossary.md", "\\*exact\\*|^\\| (exact|intact)", PROPERTY),
    NoCheck("docs/config.md", "continue if an exact operation is measured", PROPERTY),
    NoCheck("docs/training.md", "verified on CPUs", PROPERTY),
    NoCheck("docs/metrics.md", "1e-6 is tested", PROPERTY),
)
