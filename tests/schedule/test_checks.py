"""Broken schedules: each with the place of its mistake and what the message must say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instar.config.errors import ConfigError, ConfigProblem
from instar.config.load import loaded_from_json
from instar.schedule.checks import load_checked

# text, line:column, message, hint (parts of them)
BROKEN = [
    # the file
    ("name: change_lr\n", "1:1", "a schedule is a list of operations", "begin each with '- name:'"),
    ("3\n", "1:1", "a schedule is a list of operations, got 3", ""),
    ("", "", "the file is empty", ""),
    ("- {name: change_lr\n", "1:3", "this bracket is not closed", ""),
    ("- !x {name: change_lr}\n", "1:3", "tags such as", ""),
    # with the shape that the run begins with
    ("model: {n_layr: 2}\nschedule: []\n", "1:9", "unknown key 'n_layr' in model", "did you mean 'n_layer'?"),
    ("model: {n_layer: -1}\nschedule: []\n", "1:18", "model.n_layer must be", ""),
    ("model: 3\nschedule: []\n", "1:8", "model is a section", ""),
    ("model: {n_layer: 2}\nschedule: 3\n", "2:11", "a schedule is a list of operations, got 3", ""),
    ("model: {n_layer: 2}\nschedule:\n- 7\n", "3:3", "schedule[0] must be a section of keys, got 7", ""),
    ("model: {n_layer: 2}\nschedule: []\nname: a\n", "1:1", "a schedule is a list of operations", "this is a config"),
    # entries
    ("- 7\n", "1:3", "schedule[0] must be a section of keys, got 7", ""),
    ("- {value: 2, max_wait_iters: 3}\n", "1:3", "schedule[0].name is missing", ""),
    ("- {name: 3, max_wait_iters: 3}\n", "1:10", "schedule[0].name must be text, got 3", ""),
    ("- {name: change_lr, value: 2}\n", "1:3", "this operation could never fire", "trigger_loss"),
    (
        "- {name: change_lr, value: 2, trigger_los: 6.0}\n",
        "1:44",
        "schedule[0].trigger_los is unknown",
        "did you mean 'trigger_loss'?",
    ),
    (
        "- {name: change_lr, value: 2, max_wait_iters: 3, reevaluate: yes}\n",
        "1:62",
        "must be true or false",
        "write true",
    ),
    (
        "- {name: change_lr, value: 2, max_wait_iters: 3, on_failure: skpi}\n",
        "1:62",
        "one of stop, skip",
        "did you mean 'skip'?",
    ),
    ("- {name: change_lr, value: 2, max_wait_iters: -1}\n", "1:47", "of at least 0 or null, got -1", ""),
    ("- {name: change_lr, value: 2, max_wait_iters: 5e4}\n", "1:47", "must be a whole number", "write 50000"),
    ("- {name: change_lr, value: 2, trigger_loss: low}\n", "1:45", 'a number or null, got "low"', ""),
    ("- {name: change_lr, value: 2, trigger_loss: .inf}\n", "1:45", "must be a finite number", ""),
    ("- {name: change_lr, value: 2, max_wait_iters: 3, min_steps: -1}\n", "1:61", "greater than 0", ""),
    ("- {name: change_lr, value: 2, max_wait_iters: 3, max_params: 1e6}\n", "1:62", "a whole number", ""),
    # operations
    ("- {name: change_rl, value: 2, max_wait_iters: 3}\n", "1:10", "must be an operation", "did you mean 'change_lr'?"),
    ("- {name: zzz, value: 2, max_wait_iters: 3}\n", "1:10", "must be an operation, got 'zzz'", "there are add_heads"),
    ("- {name: fold_masks, max_wait_iters: 3}\n", "1:10", "must not be fold_masks", ""),
    ("- {name: change_lr, value: two, max_wait_iters: 3}\n", "1:28", 'schedule[0].value must be a positive number, got "two"', ""),
    ("- {name: change_lr, value: .nan, max_wait_iters: 3}\n", "1:28", "schedule[0].value must be a finite number", ""),
    ("- {name: change_lr, max_wait_iters: 3}\n", "1:3", "schedule[0].value must be a positive number, got null", ""),
    ("- {name: set_lr, value: -1, max_wait_iters: 3}\n", "1:25", "must be a positive number, got -1", ""),
    ("- {name: set_eval_iters, value: 0, max_wait_iters: 3}\n", "1:33", "must be a positive whole number, got 0", ""),
    ("- {name: set_eval_iters, value: 1.5, max_wait_iters: 3}\n", "1:33", "must be a whole number, got 1.5", ""),
    ("- {name: reset_lr_schedule, value: now, max_wait_iters: 3}\n", "1:36", "must be left out", ""),
    ("- {name: freeze, value: 3, max_wait_iters: 3}\n", "1:25", "must be a pattern of parameter names", ""),
    ("- {name: widen_mlp, value: two, max_wait_iters: 3}\n", "1:28", "schedule[0].value needs a whole number above 0", ""),
    ("- {name: widen_mlp, value: 64, how: odd, max_wait_iters: 3}\n", "1:37", "schedule[0].how must be zero or split", ""),
    ("- {name: widen_mlp, value: 64, hwo: zero, max_wait_iters: 3}\n", "1:37", "schedule[0].hwo is unknown", ""),
    ("- {name: change_lr, value: 2, how: zero, max_wait_iters: 3}\n", "1:36", "schedule[0].how is not an option of change_lr", ""),
    ("- {name: set_context, value: 64, lr: sqrt, max_wait_iters: 3}\n", "1:38", "schedule[0].lr is not an option of set_context, whose option is tokens", ""),
    ("- {name: set_context, value: 64, tokens: kept, max_wait_iters: 3}\n", "1:42", "schedule[0].tokens must be change or keep", ""),
    ("- {name: set_batch_size, value: 64, lr: root, max_wait_iters: 3}\n", "1:41", "schedule[0].lr must be keep, sqrt, linear or {exponent: 0.6}", ""),
    ("- {name: change_lr, value: 2, when: {noise_scale: {above: 0}}}\n", "1:59", "greater than 0", ""),
    ("- {name: change_lr, value: 2, repeat: 2, when: {at_step: 3}}\n", "1:39", "schedule[0].repeat is of no use", "add min_steps"),
    ("- {name: widen_mlp, value: 64, lr: warm, max_wait_iters: 3}\n", "1:36", "schedule[0].lr must be keep, reset", ""),
    ("- {name: insert_layers, value: 1, mask: 0, max_wait_iters: 3}\n", "1:41", "schedule[0].mask needs a whole number", ""),
    # triggers
    ("- {name: change_lr, value: 2, when: {}}\n", "1:37", "schedule[0].when is empty", "use loss_below"),
    ("- {name: change_lr, value: 2, when: 3}\n", "1:37", "schedule[0].when must be", ""),
    ("- {name: change_lr, value: 2, when: {los_below: 3}}\n", "1:38", "unknown key 'los_below' in schedule[0].when", "did you mean 'loss_below'?"),
    ("- {name: change_lr, value: 2, when: {at_step: -1}}\n", "1:47", "of at least 0", ""),
    ("- {name: change_lr, value: 2, when: {at_fraction: 1.0}}\n", "1:51", "less than 1", ""),
    ("- {name: change_lr, value: 2, when: {at_tokens: 50it}}\n", "1:49", "is not a number of tokens: '50it' counts steps", ""),
    ("- {name: change_lr, value: 2, when: {at_tokens: many}}\n", "1:49", "not a budget: 'many'", ""),
    ("- {name: change_lr, value: 2, when: {at_tokens: 2.5}}\n", "1:49", "a whole number greater than 0 or text", ""),
    ("- {name: change_lr, value: 2, when: {any: []}}\n", "1:43", "schedule[0].when.any is empty", "list triggers"),
    ("- {name: change_lr, value: 2, when: {any: [{}]}}\n", "1:44", "schedule[0].when.any[0] is empty", ""),
    ("- {name: change_lr, value: 2, when: {all: [{waited: 0}]}}\n", "1:53", "schedule[0].when.all[0].waited must be", ""),
    ("- {name: change_lr, value: 2, when: {all: {waited: 1}}}\n", "1:43", "schedule[0].when.all must be a list", ""),
    ("- {name: change_lr, value: 2, when: {plateau: {window: 1, slope: 1}}}\n", "1:56", "window must be a whole number of at least 2", ""),
    ("- {name: change_lr, value: 2, when: {plateau: {window: 3}}}\n", "1:47", "plateau.slope is missing", ""),
    ("- {name: change_lr, value: 2, when: {plateau: {window: 3, slope: -1}}}\n", "1:66", "of at least 0", ""),
    ("- {name: change_lr, value: 2, when: {slope_below: {window: 3}}}\n", "1:51", "slope_below needs slope or curve", ""),
    ("- {name: change_lr, value: 2, when: {slope_below: {window: 3, curve: {floor: 1, flops: 0, exponent: 1}}}}\n", "1:88", "greater than 0", ""),
    ("- {name: change_lr, value: 2, when: {waited: 3}, max_wait_iters: 3}\n", "1:37", "cannot be combined with trigger_loss and max_wait_iters", "under 'any:'"),
    # with what else the config says
    ("- {name: set_context, value: 129, max_wait_iters: 3}\n", "1:30", "more than the 128 tokens", "extend_context before it"),
]  # fmt: skip


def problems_of(text: str, path: Path, *options: str) -> tuple[ConfigProblem, ...]:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_checked(None, [*options, f"schedule={path}"])
    return caught.value.problems


@pytest.mark.parametrize(("text", "place", "message", "hint"), BROKEN)
def test_one_mistake_is_named_where_it_stands(
    tmp_path: Path, text: str, place: str, message: str, hint: str
) -> None:
    path = tmp_path / "grow.yaml"
    (problem,) = problems_of(text, path)
    assert problem.where == (f"{path}:{place}" if place else str(path))
    assert message in problem.message
    assert hint in problem.hint
    for jargon in ("input should", "pydantic", "instance of", "tuple"):
        assert jargon not in problem.message.lower()


def test_all_mistakes_of_schedule_config_and_options_come_at_once(tmp_path: Path) -> None:
    schedule, config = tmp_path / "grow.yaml", tmp_path / "run.yaml"
    schedule.write_text(
        "- name: change_lr\n"
        '  value: "two"\n'
        "  max_wait_iters: none\n"
        "- name: widen_mpl\n"
        "  value: 1024\n"
        "  trigger_loss: 3.5\n"
        "- name: set_batch_size\n"
        "  value: 2.5\n"
        "  when: {at_fraction: 0.5}\n"
    )
    config.write_text(f"schedule: {schedule}\nmodel:\n  n_hed: 4\n")
    with pytest.raises(ConfigError) as caught:
        load_checked(str(config), ["train.until=10min", "learning_rate.shape=constant"])
    message = str(caught.value).replace(f"{tmp_path}/", "")
    assert message == (
        "run.yaml:3:3: unknown key 'n_hed' in model; did you mean 'n_head'?\n"
        "  3 |   n_hed: 4\n"
        "    |   ^\n"
        "grow.yaml:3:19: schedule[0].max_wait_iters must be a whole number of at least 0 or null, "
        'got "none"; write null\n'
        "  3 |   max_wait_iters: none\n"
        "    |                   ^\n"
        "grow.yaml:4:9: schedule[1].name must be an operation, got 'widen_mpl'; did you mean "
        "'widen_mlp'?\n"
        "  4 | - name: widen_mpl\n"
        "    |         ^\n"
        "grow.yaml:8:10: schedule[2].value must be a whole number, got 2.5\n"
        "  8 |   value: 2.5\n"
        "    |          ^\n"
        "grow.yaml:9:23: schedule[2].when.at_fraction needs a budget of steps, tokens, samples or "
        "epochs; add a budget such as 2000it to train.until, or use at_step\n"
        "  9 |   when: {at_fraction: 0.5}\n"
        "    |                       ^\n"
        "5 errors. Nothing was started.   Keys: instar config schema model"
    )


def test_noise_that_is_not_measured_fires_nothing(tmp_path: Path) -> None:
    text = "- {name: change_lr, value: 2, when: {noise_scale: {above: 1}}}\n"
    (problem,) = problems_of(text, tmp_path / "grow.yaml", "record.noise_every=0")
    assert "schedule[0].when.noise_scale is not measured in this run" in problem.message
    assert "record.noise_every" in problem.hint


def test_an_unreadable_entry_hides_no_other_and_raises_no_false_alarm(tmp_path: Path) -> None:
    text = (
        "- {name: extend_context, value: 512, max_wait_iters: soon}\n"
        "- {name: set_context, value: 512, max_wait_iters: 3}\n"
        "- {name: change_lr, value: -2, max_wait_iters: 3}\n"
    )
    first, second = problems_of(text, tmp_path / "grow.yaml")
    assert "schedule[0].max_wait_iters" in first.message
    assert "schedule[2].value" in second.message


def test_inline_and_json_and_a_file_are_the_same(tmp_path: Path) -> None:
    entries = [
        {"name": "change_lr", "value": 2.0, "trigger_loss": 6.0, "max_wait_iters": 50000},
        {"name": "widen_mlp", "value": "x2", "how": "split", "when": {"any": [{"at_step": 3}]}},
    ]
    (tmp_path / "grow.json").write_text(json.dumps(entries, indent="\t"))
    (tmp_path / "grow.yaml").write_text(
        "- name: change_lr\n  value: 2.0\n  trigger_loss: 6.0\n  max_wait_iters: 50000\n"
        "- {name: widen_mlp, value: x2, how: split, when: {any: [{at_step: 3}]}}\n"
    )
    (tmp_path / "run.yaml").write_text(f"name: a\nschedule: {json.dumps(entries)}\n")
    inline = load_checked(str(tmp_path / "run.yaml"), ["name=gpt"]).config
    for file in ("grow.json", "grow.yaml"):
        assert load_checked(None, [f"schedule={tmp_path / file}"]).config == inline
    assert len(inline.schedule) == 2


def test_a_file_may_name_the_shape_that_the_run_begins_with(tmp_path: Path) -> None:
    path = tmp_path / "grow.yaml"
    entry = "{name: stack_layers, value: 4, when: {at_step: 3}}"
    path.write_text(f"model: {{n_layer: 2}}\nschedule:\n- {entry}\n")
    overrides = ["model.n_layer=8", "model.n_embd=64", f"schedule={path}"]
    loaded_config = load_checked(None, overrides)
    inline = load_checked(None, ["model.n_layer=2", "model.n_embd=64", f"schedule=[{entry}]"])
    assert loaded_config.config == inline.config
    assert loaded_config.origins["model.n_layer"] == f"{path}:1:9"
    assert loaded_config.origins["schedule[0]"] == f"{path}:3:3"
    assert loaded_from_json(loaded_config.to_json()).config == loaded_config.config
    copy = tmp_path / "run.yaml"
    copy.write_text(loaded_config.to_yaml())
    assert load_checked(str(copy)).config == loaded_config.config


def test_the_resolved_config_holds_the_schedule_and_where_each_operation_stood(
    tmp_path: Path,
) -> None:
    path, copy = tmp_path / "grow.yaml", tmp_path / "run.yaml"
    path.write_text(
        "- {name: change_lr, value: 2.0, trigger_loss: 6.0}\n\n"
        "- name: freeze\n  value: ['blocks.*', \"a: b\"]\n  when: {all: [{waited: 3}]}\n"
    )
    loaded_config = load_checked(None, [f"schedule={path}"])
    copy.write_text(loaded_config.to_yaml(), encoding="utf-8")
    path.unlink()
    assert load_checked(str(copy)).config == loaded_config.config
    lines = [
        line for line in copy.read_text().splitlines() if line.startswith(("  - ", "schedule"))
    ]
    assert [line.split("# ")[1] for line in lines] == ["--set", f"{path}:1:3", f"{path}:3:3"]
    assert loaded_config.origins["schedule[1]"] == f"{path}:3:3"


def test_a_schedule_is_looked_for_where_one_is(tmp_path: Path) -> None:
    (tmp_path / "grow.yaml").write_text("[]\n")
    config = tmp_path / "run.yaml"
    config.write_text("schedule: grow.yaml\n")
    with pytest.raises(ConfigError) as caught:
        load_checked(str(config))
    (problem,) = caught.value.problems
    assert (problem.where, problem.message) == (f"{config}:1:11", "no such file: grow.yaml")
    assert problem.hint == f"did you mean '{tmp_path / 'grow.yaml'}'?"


def test_what_fits_raises_no_alarm(tmp_path: Path) -> None:
    path = tmp_path / "grow.yaml"
    path.write_text(
        "- {name: extend_context, value: 256, when: {at_fraction: 0.1}}\n"
        "- {name: set_context, value: 256, when: {at_tokens: 50Mtok}}\n"
        "- {name: extend_context, value: x2, when: {at_step: 0}}\n"
        "- {name: set_context, value: 512, max_wait_iters: 3}\n"
        "- {name: reset_lr_schedule, value: 1.0, max_wait_iters: 3, reevaluate: true}\n"
    )
    assert len(load_checked(None, [f"schedule={path}"]).config.schedule) == 5
