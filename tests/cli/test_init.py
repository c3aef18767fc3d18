import sys
from pathlib import Path

import pytest
from needed import without_deleted

from instar.cli.main import main
from instar.config import STARTERS
from instar.config.load import load_config
from instar.config.writers.starter import starter_files
from instar.schedule.checks import load_checked
from instar.schedule.forecast import checked_forecast
from instar.tasks.task import spec_class

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_gpt_yaml_and_names_the_next_command(
    working_directory: Path, capsys: Captured
) -> None:
    assert main(["init"]) == 0
    assert capsys.readouterr() == ("", "wrote gpt.yaml   next: instar train gpt.yaml\n")
    assert load_config(str(working_directory / "gpt.yaml")).config.data.tokenizer == "bpe"


def test_init_writes_where_it_is_told(working_directory: Path) -> None:
    assert main(["init", "gpt", "small.yaml", "--preset", "llama"]) == 0
    config = load_config(str(working_directory / "small.yaml")).config
    assert config.preset == ("llama",)
    assert config.model.norm == "rmsnorm"


def test_init_writes_every_kind(working_directory: Path) -> None:
    for kind in starter_files():
        assert main(["init", kind]) == 0
        assert load_checked(str(working_directory / f"{kind}.yaml")).config.name == kind


@pytest.mark.parametrize("preset", ["moult", "family"])
def test_init_writes_the_final_shape_of_a_preset_that_grows(
    preset: str, working_directory: Path, capsys: Captured
) -> None:
    assert main(["init", "gpt", "--preset", preset]) == 0
    text = (working_directory / "gpt.yaml").read_text("utf-8")
    assert f"# preset {preset}: the config names the " in text
    assert "\n  n_layer: 4\n" in text
    assert f"\n# schedule: made by preset {preset}, see --dry-run\n" in text
    assert "\n  #name: muon\n" in text
    loaded_config = load_checked(str(working_directory / "gpt.yaml"))
    assert loaded_config.config.model.n_layer == 1
    assert loaded_config.origins["optimizer.name"] == f"preset {preset}"
    assert [entry.name for entry in loaded_config.config.schedule].count("stack_layers") >= 1
    # a starter with a schedule of its own cannot have another
    assert main(["init", "growth", "--preset", preset]) == 2
    assert "makes the schedule, and the config has its own" in capsys.readouterr().err


def test_init_overwrites_nothing_unless_forced(working_directory: Path, capsys: Captured) -> None:
    file = working_directory / "gpt.yaml"
    file.write_text("name: mine\n")
    assert main(["init", "gpt"]) == 2
    assert "gpt.yaml: the file already exists; --force overwrites it" in capsys.readouterr().err
    assert file.read_text() == "name: mine\n"
    assert main(["init", "gpt", "--force"]) == 0
    assert load_config(str(file)).config.name == "gpt"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gpt", "no/such/gpt.yaml"], "no/such/gpt.yaml: cannot be written"),
        (["gtp"], "'gtp' is not"),
        (["gpt", "--preset", "lama"], "'lama' is not one of"),
        (["finetune", "--preset", "llama"], "presets are for language models, not for task causal"),
    ],
)
def test_what_cannot_be_written_ends_in_2(
    args: list[str], message: str, working_directory: Path, capsys: Captured
) -> None:
    assert main(["init", *args]) == 2
    assert message in capsys.readouterr().err
    assert list(working_directory.iterdir()) == []


def test_the_demo_trains_samples_and_names_the_next_commands(
    working_directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotext", None)
    small = ["data.max_bytes=60000", "data.vocab_size=300", "model.n_embd=16", "model.n_mlp=16"]
    small += ["train.batch_size=4", "train.until=4it", "eval.eval_interval=2", "eval.eval_iters=1"]
    assert main(["demo", *(word for text in small for word in ("--set", text))]) == 0
    output, messages = capfd.readouterr()
    (run,) = working_directory.glob("runs/demo-*")
    assert f'instar sample runs/{run.name} --prompt "def "' in messages
    assert output.startswith("def ")
    next_commands = messages.split("\nnext:\n")[1].splitlines()
    assert [line.split("#")[0].strip() for line in next_commands] == without_deleted(
        [
            "instar logs plot",
            "instar report -o run.html",
            "instar dashboard",
            "instar init",
        ]
    )
    assert next_commands[0].endswith("first: pip install 'instar[plot]'")


def test_the_demo_grows_twice_at_the_latest_before_its_end() -> None:
    loaded_config = load_checked(str(STARTERS / "demo.yaml"))
    stages = checked_forecast(
        loaded_config, spec_class("language").assume(loaded_config, print), 1
    ).stages
    assert [stage.parameters.total for stage in stages] == sorted(
        stage.parameters.total for stage in stages
    )
    assert len({stage.parameters.total for stage in stages}) == 3
