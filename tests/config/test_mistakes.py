"""Broken configs: each with the place of its mistake and what the message must say."""

import re
import time
from pathlib import Path

import pytest
from cases import parametrize_first

from instar.config.errors import ConfigError, ConfigProblem
from instar.config.load import load_config

# text, line:column, message, hint (parts of them)
BROKEN = [
    # syntax
    ("model: {n_layer: 4\n", "1:8", "this bracket is not closed", ""),
    ("model: [n_layer\nseed: 1\n", "1:8", "this bracket is not closed", ""),
    ("model:\n\tn_layer: 4\n", "2:1", "a tab is not allowed here; indent with spaces", ""),
    ("model:\n  n_layer: 4\n n_head: 4\n", "3:2", "does not line up", ""),
    ("model: n_layer: 4\n", "1:15", "a ':' is not allowed here", ""),
    ("name: 'abc\n", "1:7", "this quote is never closed", ""),
    ("name: @abc\n", "1:7", "cannot begin with this character", ""),
    ("name: a\nseed: *b\n", "2:7", "an alias (*name) whose anchor", ""),
    ("name: a\n---\nname: b\n", "2:1", "a second document begins here", ""),
    ('name: "\\q"\n', "1:9", "no such escape", ""),
    ("name: a\x01b\n", "1:8", "U+0001 is not allowed", ""),
    ("x: " + "[" * 60 + "]" * 60 + "\n", "1:43", "nested more than 40 levels deep", ""),
    # a document that is no config
    ("- a\n- b\n", "1:1", "a config consists of 'key: value' lines", ""),
    ("just words\n", "1:1", "a config consists of 'key: value' lines", ""),
    ("? [a, b]\n: 1\n", "1:3", "a key must be a word", ""),
    ("seed: !secret 3\n", "1:7", 'tags such as "!secret" are not understood', ""),
    ("seed: !!int abc\n", "1:7", "cannot be read as a whole number", ""),
    ("model: &m\n  bias: *m\n", "1:8", "an anchor contains itself", ""),
    ("<<: 3\n", "1:1", "'<<' merges mappings only", ""),
    # keys
    ("modle:\n  n_layer: 3\n", "1:1", "unknown key 'modle'", "did you mean 'model'?"),
    ("model:\n  n_hed: 3\n", "2:3", "unknown key 'n_hed' in model", "did you mean 'n_head'?"),
    ("model:\n  N_LAYER: 3\n", "2:3", "unknown key 'N_LAYER'", "did you mean 'n_layer'?"),
    ("model:\n  lr: 3e-4\n", "2:3", "unknown key 'lr' in model", "'lr' belongs in optimizer"),
    ("n_layer: 3\n", "1:1", "unknown key 'n_layer'", "'n_layer' belongs in model"),
    ("model:\n  seed: 3\n", "2:3", "unknown key 'seed'", "'seed' belongs at the top level"),
    ("model:\n  vocab: 3\n", "2:3", "unknown key 'vocab' in model", "did you mean 'vocab_size'?"),
    ("model:\n  block_size: 8\n", "2:3", "unknown key", "did you mean 'context'?"),
    ("model:\n  d_modle: 8\n", "2:3", "unknown key", "did you mean 'n_embd'?"),
    ("train:\n  max_iters: 3\n", "2:3", "unknown key", "did you mean 'until'?"),
    ("model.n_layer: 3\n", "1:1", "unknown key", "write 'n_layer:' under 'model:'"),
    ("ddp:\n  static_graph: true\n", "1:1", "unknown key 'ddp'", "belongs in parallel"),
    ("lora_r: 16\n", "1:1", "unknown key 'lora_r'", "an operation: schedule: [{name: set_lora_rank"),
    ("model:\n  load_in_4bit: true\n", "2:3", "unknown key", "quantized ones are not trained"),
    ("sample_packing: true\n", "1:1", "unknown key", "did you mean 'data.packing'?"),
    ("parallel:\n  ddp:\n    bucket: 3\n", "3:5", "in parallel.ddp", "'bucket_cap_mb'?"),
    ("model:\n  zzz: 3\n", "2:3", "unknown key 'zzz' in model", ""),
    ("1: 2\n", "1:1", "unknown key '1'", ""),
    ("seed: 1\nname: a\nseed: 2\n", "3:1", "duplicate key 'seed'; first given at", "1:1"),
    ("model:\n  bias: true\n  bias: true\n", "3:3", "duplicate key 'bias' in model", "2:3"),
    # types
    ('model:\n  n_layer: "two"\n', "2:12", 'a whole number of at least 0, got "two"', ""),
    ('model:\n  n_layer: "2"\n', "2:12", 'a whole number of at least 0, got "2"', "drop the quotes"),
    ("model:\n  n_layer: 2.0\n", "2:12", "must be a whole number", "write 2"),
    ("model:\n  n_layer: 12k\n", "2:12", "must be a whole number", "write the number out"),
    ("model:\n  n_layer: null\n", "2:12", "got null", "leave the line out for the default, 4"),
    ("model:\n  n_mlp: None\n", "2:10", "greater than 0 or null", "write null"),
    ("model:\n  n_layer: [4]\n", "2:12", "got [4]", ""),
    ("seed: 1e3\n", "1:7", "must be a whole number", "write 1000"),
    ("optimizer:\n  lr: '3e-4'\n", "2:7", "a number greater than 0", "drop the quotes"),
    ("optimizer:\n  lr: fast\n", "2:7", 'a number greater than 0, got "fast"', ""),
    ("compile: yes\n", "1:10", 'compile must be true or false, got "yes"', "write true"),
    ("model:\n  bias: off\n", "2:9", 'must be true or false, got "off"', "write false"),
    ("model:\n  bias: 1\n", "2:9", "must be true or false, got 1", ""),
    ("data:\n  source: 7\n", "2:11", "data.source must be text, got 7", 'in quotes to make it text: "7"'),
    ("model: 3\n", "1:8", "model is a section of 'key: value' lines, got 3", ""),
    ("learning_rate: 3e-4\n", "1:16", "learning_rate is a section", "did you mean 'optimizer.lr'?"),
    ("optimizer:\n  no_decay: [a, 1]\n", "2:17", "optimizer.no_decay[1] must be text", ""),
    # choices and patterns
    ("model:\n  norm: rmsnrom\n", "2:9", "one of layernorm, rmsnorm", "did you mean 'rmsnorm'?"),
    ("precision: FP32\n", "1:12", "one of auto, fp32, bf16, fp16", "did you mean 'fp32'?"),
    ("device: gpu\n", "1:9", 'auto, cpu, cuda or cuda:<index>, got "gpu"', ""),
    ("name: 'a b'\n", "1:7", "a name of letters, digits", ""),
    ("preset: lama\n", "1:9", 'unknown preset "lama"', "did you mean 'llama'?"),
    ("preset: [llama, plian]\n", "1:17", 'unknown preset "plian"', "did you mean 'plain'?"),
    ("preset: 3\n", "1:9", "unknown preset 3", "there are "),
    # ranges
    ("model:\n  n_head: 0\n", "2:11", "a whole number greater than 0, got 0", ""),
    ("train:\n  batch_size: 0\n", "2:15", "a whole number greater than 0, got 0", ""),
    ("model:\n  dropout: 1.0\n", "2:12", "of at least 0 and less than 1, got 1.0", ""),
    ("learning_rate:\n  min_lr_ratio: 2\n", "2:17", "at most 1, got 2", ""),
    ("seed: -1\n", "1:7", "of at least 0 and less than 2^63, got -1", ""),
    ("optimizer:\n  lr: .nan\n", "2:7", "optimizer.lr must be a finite number", ""),
    ("optimizer:\n  lr: 1e999\n", "2:7", "optimizer.lr must be a finite number", ""),
    ("seed: " + "9" * 5000 + "\n", "1:7", "cannot be read as a whole number", ""),
    # budgets
    ("train:\n  until: 10 minutes\n", "2:10", "train.until[0]: not a budget", ""),
    ("train:\n  until: [2000it, 5Mtokk]\n", "2:19", "train.until[1]: not a budget", ""),
    ("train:\n  until: 2000\n", "2:10", "train.until must be a list of texts", "write 2000it"),
    ("train:\n  until: []\n", "2:10", "the run would never end", "e.g. 2000it"),
    # keys that do not fit each other
    ("model:\n  n_embd: 130\n", "2:11", "n_embd (130) must be divisible by model.n_head (4)", ""),
    ("model:\n  n_head: 3\n", "2:11", "n_embd (128) must be divisible by model.n_head (3)", ""),
]  # fmt: skip


def problems_of(path: Path | str | None, *overrides: str) -> tuple[ConfigProblem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(None if path is None else str(path), overrides)
    return caught.value.problems


@pytest.mark.parametrize(("text", "place", "message", "hint"), BROKEN)
def test_one_mistake_is_named_where_it_stands(
    tmp_path: Path, text: str, place: str, message: str, hint: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    (problem,) = problems_of(path)
    assert problem.where == f"{path}:{place}"
    assert message in problem.message
    assert hint in f"{problem.message}; {problem.hint}"
    assert not hint or problem.hint or "duplicate" in problem.message


@pytest.mark.parametrize("text", [text for text, *_ in BROKEN])
def test_messages_are_free_of_the_library_s_jargon(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    (problem,) = problems_of(path)
    message = problem.message.lower()
    for word in ("input should", "valid integer", "instance of", "pydantic", "tuple", "while par"):
        assert word not in message


def test_all_mistakes_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "grow.yaml"
    path.write_text(
        "name: grow\n"
        "model:\n"
        "  n_embd: 768\n"
        "  n_hed: 12\n"
        '  n_layer: "two"\n'
        "optimizer:\n"
        "  lr: 3e-4\n"
        "  lr: 1e-4\n"
        "learning_rate:\n"
        "  lr_decay_iters: 100\n"
        "  warmup_iters: 200\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(path), ["model.nrom=rmsnorm", "train.until=[9parsecs]"])
    assert str(caught.value).replace(str(path), "grow.yaml") == (
        "grow.yaml:4:3: unknown key 'n_hed' in model; did you mean 'n_head'?\n"
        "  4 |   n_hed: 12\n"
        "    |   ^\n"
        'grow.yaml:5:12: model.n_layer must be a whole number of at least 0, got "two"\n'
        '  5 |   n_layer: "two"\n'
        "    |            ^\n"
        "grow.yaml:8:3: duplicate key 'lr' in optimizer; first given at grow.yaml:7:3\n"
        "  8 |   lr: 1e-4\n"
        "    |   ^\n"
        "grow.yaml:11:17: learning_rate.warmup_iters (200) must be less than "
        "learning_rate.lr_decay_iters (100)\n"
        " 11 |   warmup_iters: 200\n"
        "    |                 ^\n"
        "--set model.nrom=rmsnorm: unknown key 'nrom' in model; did you mean 'norm'?\n"
        "--set train.until=[9parsecs]: train.until[0]: not a budget: '9parsecs'; write 2000it or "
        "2kit (steps), 50Mtok or 1.5Btok (tokens), 10ksamples, 3ep (epochs), 90s, 10min, 2h, "
        "loss<3.0\n"
        "6 errors. Nothing was started.   Keys: instar config schema model"
    )


def test_every_duplicate_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\nseed: 2\nseed: 3\nname: a\nname: b\n")
    assert [problem.where.removeprefix(f"{path}:") for problem in problems_of(path)] == [
        "2:1",
        "3:1",
        "5:1",
    ]


def test_a_mistyped_key_raises_no_false_alarm_about_its_default(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  n_embd: 126\n  n_hed: 3\n")
    (problem,) = problems_of(path)
    assert "unknown key 'n_hed'" in problem.message


def test_an_unreadable_value_leaves_the_rest_of_its_section_checked(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  n_head: !x 3\n  norm: batch\n")
    assert [problem.key for problem in problems_of(path)] == ["", "model.norm"]


@pytest.mark.parametrize(
    ("option", "message", "hint"),
    [
        ("model.n_hed=4", "unknown key 'n_hed' in model", "did you mean 'n_head'?"),
        ("foo", "--set expects key=value", "e.g. --set model.n_layer=6"),
        ("=3", "--set expects key=value", "e.g. --set model.n_layer=6"),
        ("model.n_head=", "model.n_head must be a whole number greater than 0, got null", "leave"),
        ("model.n_head=[4", "not readable as YAML: this bracket is not closed", ""),
        ("model.n_head.x=4", 'model.n_head must be a whole number greater than 0, got {"x": 4}', ""),
        ("model..n_head=4", "unknown key '' in model", ""),
        ("compile=yes", 'compile must be true or false, got "yes"', "write true"),
        ("preset=fsat", 'unknown preset "fsat"', ""),
        ("n_head=4", "unknown key 'n_head'", "'n_head' belongs in model"),
    ],
)  # fmt: skip
def test_an_option_is_its_own_place(option: str, message: str, hint: str) -> None:
    (problem,) = problems_of(None, option)
    assert problem.where == f"--set {option}"
    assert problem.excerpt == ""
    assert message in problem.message
    assert hint in problem.hint


def test_no_message_can_steer_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text('"\\e[31mkey": 1\nname: "\\e[31m"\n')
    problems = problems_of(path, "\x1b[31m=1", "model.\x1b[31m=[")
    assert len(problems) == 4
    assert not any("\x1b" in str(problem) for problem in problems)


def test_a_missing_file_is_likened_to_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "grow.yaml").write_text("name: a\n")
    (problem,) = problems_of(tmp_path / "gorw.yaml")
    assert problem.message == "no such file"
    assert problem.hint == f"did you mean '{tmp_path / 'grow.yaml'}'?"


def test_mistakes_in_options_are_told_beside_a_missing_file(tmp_path: Path) -> None:
    problems = problems_of(tmp_path / "none.yaml", "model.n_hed=4")
    assert [problem.message for problem in problems] == [
        "no such file",
        "unknown key 'n_hed' in model",
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "null\n", "\ufeff"])
def test_an_empty_file_points_to_init(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    (problem,) = problems_of(path)
    assert problem.message == "the file is empty"
    assert "instar init gpt" in problem.hint


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path)
    assert problem.message == "is a folder, not a config file"


def test_a_path_that_cannot_be_is_reported() -> None:
    (problem,) = problems_of("a\0b.yaml")
    assert problem.message.startswith("cannot be read")


def test_bytes_that_are_no_utf8_are_located(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"seed: 1\nname: caf\xe9\n")
    (problem,) = problems_of(path)
    assert problem.where == f"{path}:2:10"
    assert problem.message == "byte 0xe9 is not UTF-8"


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"#" * ((1 << 20) + 1))
    (problem,) = problems_of(path)
    assert problem.message == "larger than 1 MiB; this is not a config"


@parametrize_first(
    "text",
    [
        "".join(f"k{n}: 0\n" for n in range(70_000)),
        "a: {" + "b: 1, " * 150_000 + "}",
        "a: [" + "1," * 500_000 + "]",
        "- " * 500_000,
    ],
    first=1,
    ids=["keys", "duplicates", "flow", "nested"],
)
def test_a_mebibyte_of_values_is_refused_before_it_is_composed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    began = time.process_time()
    (problem,) = problems_of(path)
    assert re.search(r"more than 20,000 keys and values|nested more than", problem.message)
    assert time.process_time() - began < 4


@pytest.mark.torture
@pytest.mark.parametrize(
    "text",
    [
        "".join(f"n_lay{n}: 0\n" for n in range(9_900)),
        "model:\n" + "".join(f"  n_lay{n}: 0\n" for n in range(9_900)),
        "a: {" + "b: 1, " * 9_900 + "}",
    ],
    ids=["keys", "in a section", "duplicates"],
)
def test_of_thousands_of_errors_a_hundred_are_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    began = time.process_time()
    problems = problems_of(path)
    assert len(problems) == 101
    assert sum("there are more than 100 errors" in problem.message for problem in problems) == 1
    assert time.process_time() - began < 4


def test_aliases_that_unfold_without_end_are_stopped(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]
    path.write_text("\n".join(lines))
    messages = [problem.message for problem in problems_of(path)]
    assert messages.count("more than 20,000 values; this is not a config") == 1
