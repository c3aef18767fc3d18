import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config import CONFIG_VARIABLE, PRESETS, names_in
from instar.config.errors import ConfigError, ConfigProblem
from instar.config.fields import schema_keys, section_types
from instar.config.language import LanguageConfig
from instar.config.load import from_launcher, load_config, loaded_from_json
from instar.config.origins import lines_of


def write_config(folder: Path, text: str) -> str:
    path = folder / "grow.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_nothing_given_is_all_defaults() -> None:
    loaded_config = load_config(None)
    assert loaded_config.config == LanguageConfig.model_validate({})
    assert set(loaded_config.origins) == set(schema_keys(LanguageConfig))
    assert set(loaded_config.origins.values()) == {"default"}


def test_each_layer_lies_over_the_one_before(tmp_path: Path) -> None:
    path = write_config(
        tmp_path, "preset: [gpt2, llama]\nmodel:\n  bias: true\n  n_layer: 2\n  n_head: 2\n"
    )
    loaded_config = load_config(path, ["model.n_layer=6", "model.n_layer=8"])
    model, origins = loaded_config.config.model, loaded_config.origins
    assert (model.n_embd, origins["model.n_embd"]) == (128, "default")
    assert (model.norm, origins["model.norm"]) == ("rmsnorm", "preset llama")
    assert (model.bias, origins["model.bias"]) == (True, f"{path}:3:3")
    assert (model.n_head, origins["model.n_head"]) == (2, f"{path}:5:3")
    assert (model.n_layer, origins["model.n_layer"]) == (8, "--set")


def test_an_option_can_choose_the_preset(tmp_path: Path) -> None:
    loaded_config = load_config(write_config(tmp_path, "preset: llama\n"), ["preset=gpt2"])
    assert loaded_config.config.model.norm == "layernorm"
    assert loaded_config.origins["model.norm"] == "preset gpt2"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("optimizer.lr=3e-4", 3e-4),
        ("train.until=[2kit, loss<3.0]", ("2kit", "loss<3.0")),
        ("train.until=10ep", ("10ep",)),
        ("train.clip=null", None),
        ("compile=true", True),
        ("data.source=a=b", "a=b"),
        (" seed =1_000", 1000),
        ("parallel={ddp: {bucket_cap_mb: 5}}", 5.0),
    ],
)
def test_options_are_yaml(option: str, value: object) -> None:
    config = load_config(None, [option]).config
    values = {
        "optimizer.lr": config.optimizer.lr,
        "train.until": config.train.until,
        "train.clip": config.train.clip,
        "compile": config.compile,
        "data.source": config.data.source,
        "seed": config.seed,
        "parallel": config.parallel.ddp.bucket_cap_mb,
    }
    assert values[option.partition("=")[0].strip()] == value


def test_an_empty_section_is_all_defaults(tmp_path: Path) -> None:
    assert (
        load_config(write_config(tmp_path, "name: a\nmodel:\ndata:\n")).config.model
        == LanguageConfig.model_validate({}).model
    )


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    assert load_config(write_config(tmp_path, "\ufeffname: a\n")).config.name == "a"


def test_a_later_check_points_at_the_line(tmp_path: Path) -> None:
    path = write_config(tmp_path, "model:\n  vocab_size: 1000\ntrain:\n  until: [1kit, 1ep]\n")
    loaded_config = load_config(path, ["data.vocab_size=9"])
    problem = loaded_config.problem(
        "model.vocab_size", "the shards have 2048 tokens", hint="leave it out"
    )
    assert str(problem) == (
        f"{path}:2:15: the shards have 2048 tokens; leave it out\n"
        "  2 |   vocab_size: 1000\n"
        "    |               ^"
    )
    assert problem.key == "model.vocab_size"
    assert loaded_config.problem("train.until[1]", "x").where == f"{path}:4:17"
    assert loaded_config.problem("data.vocab_size", "x").where == "--set data.vocab_size=9"
    assert loaded_config.problem("model.n_head", "x").where == "default"


def test_a_config_is_handed_to_another_process_whole(tmp_path: Path) -> None:
    operation = "{name: change_lr, value: .5, when: {at_step: 7}}"
    path = write_config(
        tmp_path, f"preset: llama\ntrain: {{until: 8it}}\nschedule:\n- {operation}\n"
    )
    loaded_config = load_config(path, ["model.n_layer=2"])
    second = loaded_from_json(loaded_config.to_json())
    assert second.config == loaded_config.config
    assert second.to_yaml() == loaded_config.to_yaml()
    for key in (
        "train.until[0]",
        "schedule[0].when.at_step",
        "model.n_layer",
        "model.norm",
        "seed",
    ):
        assert second.problem(key, "x") == loaded_config.problem(key, "x")


def test_what_a_launcher_hands_over_is_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(load_config(None, ["seed=3"]).to_json())
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "config.json"))
    loaded_config = from_launcher()
    assert loaded_config is not None
    assert loaded_config.config.seed == 3
    assert from_launcher() is None


def test_a_value_of_a_preset_points_at_the_preset() -> None:
    problem = load_config(None, ["preset=llama"]).problem("model.norm", "x")
    assert (problem.where, problem.excerpt) == ("preset llama", "")


def test_a_clash_points_at_what_the_user_wrote_rather_than_at_a_preset(tmp_path: Path) -> None:
    path = write_config(tmp_path, "preset: llama\nmodel:\n  n_head: 4\n  n_embd: 12\n")
    with pytest.raises(ConfigError, match=r"grow\.yaml:4:11: rope turns pairs"):
        load_config(path)


def test_the_resolved_config_is_read_back_equal(tmp_path: Path) -> None:
    source = write_config(tmp_path, "preset: llama\ndata:\n  source: 'a b/*.txt'\n")
    loaded_config = load_config(
        source, ["optimizer.lr=3e-6", "train.ema=0.999", "data.text_field='#: x'"]
    )
    copy = tmp_path / "run.yaml"
    copy.write_text(loaded_config.to_yaml(), encoding="utf-8")
    second = load_config(str(copy))
    assert second.config == loaded_config.config
    assert "default" not in second.origins.values()


def test_checks_of_higher_rooms_are_told_with_all_else(tmp_path: Path) -> None:
    def check(config: LanguageConfig) -> list[ConfigProblem]:
        return [ConfigProblem(("model.n_layer",), f"{config.model.n_layer} is too few", "more")]

    path = write_config(tmp_path, "model:\n  n_hed: 3\n  n_layer: 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [], [check])
    assert [problem.message for problem in caught.value.problems] == [
        "unknown key 'n_hed' in model",
        "2 is too few",
    ]
    assert caught.value.problems[1].where == f"{path}:3:12"


def test_the_resolved_config_tells_each_origin(tmp_path: Path) -> None:
    text = load_config(
        write_config(tmp_path, "preset: llama\nseed: 3\n"), ["model.n_layer=2"]
    ).to_yaml()
    ends = {line.split(":")[0].strip(): line.split("# ")[-1] for line in text.splitlines() if line}
    assert {line.key: line.origin for line in lines_of(text)}[
        "seed"
    ] == f"{tmp_path / 'grow.yaml'}:2:1"
    assert ends["norm"] == "preset llama"
    assert ends["n_layer"] == "--set"
    assert ends["device"] == "default"
    assert "#" not in load_config(None).to_yaml(origin=False).replace("\n# ", "").replace(
        "  # ", ""
    )


@pytest.mark.parametrize("name", names_in(PRESETS))
def test_a_preset_is_valid_by_itself_and_described(name: str) -> None:
    loaded_config = load_config(None, [f"preset={name}"])
    assert f"preset {name}" in loaded_config.origins.values()
    assert (PRESETS / f"{name}.yaml").read_text().startswith("# ")


def test_presets_of_architecture() -> None:
    llama = load_config(None, ["preset=llama"]).config.model
    assert (llama.norm, llama.activation, llama.positions) == ("rmsnorm", "swiglu", "rope")
    assert (llama.bias, llama.tied) == (False, False)
    gpt2 = load_config(None, ["preset=gpt2"]).config.model
    assert (gpt2.norm, gpt2.activation, gpt2.positions) == ("layernorm", "gelu", "learned")
    assert (gpt2.bias, gpt2.tied) == (True, True)


WORDS = st.sampled_from(
    [
        *[key.rpartition(".")[2] for key in schema_keys(LanguageConfig)],
        *[section.rpartition(".")[2] for section in section_types(LanguageConfig) if section],
        *["0", "-3", "3e-4", ".nan", "0x1f", "null", "~", "true", "yes", "2000it", "llama", "rope"],
        *["'", '"', "[", "]", "{", "}", ",", "&a ", "*a", "<<: *a", "!!int ", "!x ", "|", "? ", "%Y"],
        *["\t", "#", "---", "...", "\x00", "\x85", "\u2028", "\ufeff", "é", "\\U0011FFFF", "@", "`"],
    ]
)  # fmt: skip
GLUE = st.sampled_from([": ", ":\n  ", "\n", "\n  ", "\n    ", ", ", "- ", " ", "", "\r\n"])
JUNK = st.lists(st.tuples(WORDS, GLUE), max_size=25).map(
    lambda pairs: "".join(word + glue for word, glue in pairs)
)


@settings(max_examples=400, deadline=None)
@given(text=JUNK | st.text(), option=JUNK)
def test_junk_is_a_config_or_a_config_error_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, text: str, option: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for file, options in ((str(path), []), (None, [option]), (None, [f"train.until={option}"])):
        try:
            outcome: LanguageConfig | str = load_config(file, options).config
        except ConfigError as error:
            outcome = str(error)
        assert isinstance(outcome, LanguageConfig) or "Nothing was started." in outcome


def test_loading_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    path = write_config(tmp_path, "preset: llama\nmodel:\n  n_head: 2\n")
    code = (
        "import sys\n"
        "from instar.config.load import load_config\n"
        f"load_config({path!r}, ['seed=1']).to_yaml()\n"
        "print([name for name in ('torch', 'numpy', 'rich', 'click') if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
