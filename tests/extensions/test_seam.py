"""Extensions: any of them can be deleted, and packages of others add what those of Instar do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import get_args

import pytest
from cases import parametrize_first
from forks import forks

import instar
from instar.extensions import BUILT_IN, WordKind, built_in, load_target

SOURCE = Path(instar.__file__).parent
GONE = {"fleet": ["fleet"]}
"""words that are typed of each extension"""
TARGET = re.compile(r"instar\.[\w.]+:\w+")


def run(
    path: Path,
    *words: str,
    at: Path | None = None,
    module: str = "instar",
    python: str | Path = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run `instar` or another module with a folder before all others on the path of modules."""
    env = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", module, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=at)


def run_forked(path: Path, *words: str, at: Path) -> subprocess.CompletedProcess[str]:
    """Run `instar` with a package of somebody else on the path, in a process that has imported torch already."""
    return run(path, *words, at=at, python=forks().python)


def tiny(folder: Path) -> str:
    """Write the config of a run of four steps; return its name."""
    text = "".join(f"{n} squared is {n * n}.\n" for n in range(300))
    (folder / "squares.txt").write_text(text)
    (folder / "tiny.yaml").write_text(TINY)
    return "tiny.yaml"


TINY = """\
name: tiny
model: {n_layer: 1, n_head: 2, n_embd: 16, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 4it, batch_size: 4}
learning_rate: {warmup_iters: 2}
record: {sample_tokens: 4}
"""


SMALL_DEMO = (
    "data.max_bytes=60000",
    "data.vocab_size=300",
    "model.n_embd=16",
    "model.n_mlp=16",
    "train.batch_size=4",
    "train.until=4it",
    "eval.eval_interval=2",
    "eval.eval_iters=1",
)


def copy_without(folder: Path, *names: str) -> Path:
    """Return a folder with a copy of the package in which these extensions are deleted."""
    shutil.copytree(SOURCE, folder / "instar", ignore=shutil.ignore_patterns("__pycache__"))
    for name in names:
        shutil.rmtree(folder / "instar" / "extensions" / name)
    return folder


@parametrize_first("names", [[*BUILT_IN], *([name] for name in BUILT_IN)], first=2, ids="+".join)
def test_a_deleted_extension_is_named_with_the_command_that_installs_it(
    names: list[str], tmp_path: Path
) -> None:
    package = copy_without(tmp_path / "copy", *names)
    help_result = run(package, "--help", at=tmp_path)
    assert (help_result.returncode, help_result.stderr) == (0, "")
    command_names = {
        line.split()[0]
        for line in help_result.stdout.splitlines()
        if line.startswith("  ") and line.strip()
    }
    for name in names:
        commands = BUILT_IN[name].words.get("commands", ())
        assert command_names.isdisjoint(commands)
        for module in BUILT_IN[name].words.get("programs", ()):
            refusal = run(package, at=tmp_path, module=module)
            assert refusal.returncode == 2
            assert f"{module}: this program's extension is not installed" in refusal.stderr
            assert f"pip install 'instar[{BUILT_IN[name].extra}]'" in refusal.stderr
        for section in BUILT_IN[name].words.get("sections", ()):
            refusal = run(package, "config", "show", "--set", f"{section}.x=1", at=tmp_path)
            assert refusal.returncode == 2
            assert f"unknown key '{section.rpartition('.')[2]}'" in refusal.stderr
            assert "its extension is not installed: pip install" in refusal.stderr
        for task in BUILT_IN[name].words.get("tasks", ()):
            refusal = run(package, "config", "show", "--set", f"task={task}", at=tmp_path)
            assert refusal.returncode == 2
            assert f"the extension of task '{task}' is not installed; pip install" in refusal.stderr
        for kind in BUILT_IN[name].words.get("starters", ()):
            refusal = run(package, "init", kind, at=tmp_path)
            assert refusal.returncode == 2
            assert f"the extension of '{kind}' is not installed: pip install" in refusal.stderr
        for form in BUILT_IN[name].words.get("plots", ()):
            refusal = run(package, "logs", "plot", "--format", form, "-o", "x", at=tmp_path)
            assert f"no extension draws {form}; pip install" in refusal.stderr
        for ending in BUILT_IN[name].words.get("checkpoints", ()):
            (tmp_path / f"x{ending}").write_bytes(b"x")
            refusal = run(package, *f"checkpoint import x{ending} --to y".split(), at=tmp_path)
            assert refusal.returncode == 3
            assert f"pip install 'instar[{BUILT_IN[name].extra}]'" in refusal.stderr
        for words in commands:
            refusal = run(package, *words.split(), at=tmp_path)
            assert refusal.returncode == 2
            assert f"instar {words}: this command's extension is not installed" in refusal.stderr
            assert f"pip install 'instar[{BUILT_IN[name].extra}]'" in refusal.stderr


@pytest.mark.torture
def test_the_core_trains_without_any_extension(tmp_path: Path) -> None:
    package = copy_without(tmp_path / "copy", *BUILT_IN)
    result = run(package, "train", tiny(tmp_path), at=tmp_path)
    assert result.returncode == 0, result.stderr
    listing = run(package, "logs", "list", "--json", at=tmp_path)
    assert '"step": 4' in listing.stdout
    small = [f"--set={setting}" for setting in SMALL_DEMO]
    result = run(package, "demo", *small, at=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("def ")
    assert "instar logs plot" in result.stderr
    assert "instar report" not in result.stderr


def test_what_is_said_of_a_deleted_extension_is_what_it_adds() -> None:
    extensions = built_in()
    assert [*extensions] == [*BUILT_IN]
    for name, words in BUILT_IN.items():
        assert extensions[name].name == name
        for kind in get_args(WordKind):
            assert set(getattr(extensions[name], kind)) == set(words.words.get(kind, ()))


def test_all_that_a_manifest_names_exists() -> None:
    texts = texts_in([astuple(extension) for extension in built_in().values()])
    targets = [text for text in texts if TARGET.fullmatch(text)]
    assert len(targets) > len(built_in())
    for target in targets:
        load_target(target)


def texts_in(value: object) -> Iterator[str]:
    """Yield the texts in nested data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def test_manifests_import_only_the_seam() -> None:
    code = (
        "import sys; from instar.extensions import built_in; before = set(sys.modules); built_in();"
        "print(*sorted(set(sys.modules) - before))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    modules = {f"instar.extensions.{name}" for name in BUILT_IN}
    assert set(result.stdout.split()) == modules


# A package of somebody else.

MANIFEST = """\
from instar.extensions import CommandSpec, Extension, SectionSpec, TaskNames

EXTENSION = Extension(
    name="census",
    summary="counts what is trained",
    commands={"census": CommandSpec("census_tools.cli:census", "Count parameters.")},
    sections={"census": SectionSpec("census_tools.run:CensusConfig", "what is counted")},
    conflicts="census_tools.run:conflicts",
    hook="census_tools.run:Census",
    events={"census": "census_tools.run:Counted"},
    tasks={"census": TaskNames("census_tools.task:CensusRun", "census_tools.task:CensusSpec")},
    operations={"census.double_layers": "census_tools.growth:DOUBLE"},
    page="census_tools.cli:page",
)
"""
GROWTH = """\
from instar.growth import values
from instar.growth.planners.depth import stack_layers
from instar.growth.operators import Operator

def double_layers(shape, value, options, step):
    return stack_layers(shape, 2, {"how": "interleave"}, step)

DOUBLE = Operator(double_layers, values.is_nothing, models="all")
"""
TASK = """\
from instar.config.language import LanguageConfig
from instar.tasks.language import LanguageSpec

class CensusRun(LanguageConfig):
    pass

class CensusSpec(LanguageSpec):
    pass
"""
RUN = """\
from typing import ClassVar

from instar.config.errors import ConfigProblem
from instar.config.sections import Section
from instar.record.events import ExtensionEvent
from instar.run.output.extension import RunExtension

class CensusConfig(Section):
    every: int = 1

class Counted(ExtensionEvent, tag="census", frozen=True, kw_only=True):
    table: ClassVar[str] = "census"
    parameters: int

    def metrics(self):
        return {"census": float(self.parameters)}

    def line(self):
        return f"census: {self.parameters}"

def conflicts(config):
    if config.census.every < 1:
        yield ConfigProblem(("census.every",), "nothing would be counted", "use 1")

class Census(RunExtension):
    def __init__(self, place):
        self.every, self.logger = place.config.census.every, place.logger

    def after_step(self, progress, model):
        if progress.step % self.every == 0:
            count = sum(tensor.numel() for tensor in model.parameters())
            self.logger.log_event(progress, Counted(step=progress.step, parameters=count))
"""
CLI = """\
import click

@click.group()
def census():
    "Count parameters."

@census.command()
def count():
    "Count them."
    click.echo("42 parameters")

def page(runs):
    return f"<h1>{len(runs)} runs</h1>"
"""


def install(
    folder: Path, target: str = "census_tools.extension:EXTENSION", name: str = "census"
) -> Path:
    """Write what pip leaves of a package with an extension."""
    package = folder / "census_tools"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "extension.py").write_text(MANIFEST)
    (package / "cli.py").write_text(CLI)
    (package / "run.py").write_text(RUN)
    (package / "task.py").write_text(TASK)
    (package / "growth.py").write_text(GROWTH)
    info = folder / "census_tools-1.0.dist-info"
    info.mkdir()
    metadata = (
        "Metadata-Version: 2.1\nName: census-tools\nVersion: 1.0\nSummary: Counts parameters\n"
    )
    (info / "METADATA").write_text(metadata)
    (info / "entry_points.txt").write_text(f"[instar.extensions]\n{name} = {target}\n")
    return folder


def test_a_package_adds_a_group_of_commands(tmp_path: Path) -> None:
    path = install(tmp_path / "installed")
    help_result = run(path, "--help", at=tmp_path)
    assert "Extensions of other packages:\n  census  Counts parameters" in help_result.stdout
    assert help_result.stderr == ""
    assert run(path, "census", "count", at=tmp_path).stdout == "42 parameters\n"
    assert run(path, "census", "--help", at=tmp_path).returncode == 0


def test_nothing_of_a_package_is_imported_before_its_word_is_used(tmp_path: Path) -> None:
    path = install(tmp_path / "installed")
    (path / "census_tools" / "__init__.py").write_text("raise SystemExit('imported')")
    for words in (
        ["--help"],
        ["config", "show"],
        ["logs", "list", "--json"],
        ["schedule", "--help"],
    ):
        assert "imported" not in run(path, *words, at=tmp_path).stderr


OPENED = """\
import sys
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
from instar.extensions import entry_points
print(*entry_points())
print(*(path for path in opened if "dist-info" in path), sep="\\n")
"""


def opened_for_entry_points(path: Path, cache: Path) -> tuple[list[str], list[str]]:
    """Return the words of packages' extensions, and the files of distributions opened to find them."""
    env = {**os.environ, "PYTHONPATH": str(path), "INSTAR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", OPENED]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    words, *files = result.stdout.splitlines()
    return words.split(), list(filter(None, files))


def test_distributions_are_read_again_only_when_one_was_installed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = install(tmp_path / "installed")
    for number in range(5):
        (path / f"other{number}-1.0.dist-info").mkdir()
    # what has just changed may still be being installed, and is not remembered
    assert opened_for_entry_points(path, cache)[0] == ["census"]
    (path / "census_tools-1.0.dist-info").rename(path / "census_tools-1.1.dist-info")
    assert opened_for_entry_points(path, cache)[0] == ["census"]
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))
    words, files = opened_for_entry_points(path, cache)
    assert words == ["census"]
    assert len([file for file in files if "other" in file]) == 5
    words, files = opened_for_entry_points(path, cache)
    assert words == ["census"]
    distribution = path / "census_tools-1.1.dist-info"
    assert {*map(Path, files)} == {distribution / "METADATA", distribution / "entry_points.txt"}
    shutil.rmtree(path / "census_tools-1.1.dist-info")
    assert opened_for_entry_points(path, cache)[0] == []


@pytest.mark.parametrize(
    "content", ["[", "{}", '{"PATH": 3}', '{"PATH": [NS, "../evil.dist-info"]}']
)
def test_a_damaged_cache_of_distributions_is_not_used(content: str, tmp_path: Path) -> None:
    evil = install(tmp_path, name="evil")
    (evil / "census_tools-1.0.dist-info").rename(tmp_path / "evil.dist-info")
    path = install(tmp_path / "installed")
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))
    home = tmp_path / "cache" / "extensions"
    home.mkdir(parents=True)
    home.parent.chmod(0o700)
    text = content.replace("PATH", str(path)).replace("NS", str(path.stat().st_mtime_ns))
    (home / "distributions.json").write_text(text)
    assert opened_for_entry_points(path, tmp_path / "cache")[0] == ["census"]


@pytest.mark.parametrize("name", ["fleet", "train"])
def test_a_package_cannot_take_a_name_of_instar(name: str, tmp_path: Path) -> None:
    path = install(tmp_path / "installed", name=name)
    help_result = run(path, "--help", at=tmp_path)
    assert help_result.returncode == 0
    message = f"the extension {name} of census-tools is ignored: the name is Instar's own\n"
    assert help_result.stderr == message
    assert "42" not in run(path, name, "--help", at=tmp_path).stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("EXTENSION = 3", "census_tools.extension:EXTENSION is no Extension named census"),
        (MANIFEST.replace('"census": ', '"train": '), "'train' does not begin with its name"),
    ],
)
def test_a_broken_package_breaks_only_what_uses_it(text: str, message: str, tmp_path: Path) -> None:
    path = install(tmp_path / "installed")
    (path / "census_tools" / "extension.py").write_text(text)
    assert run(path, "--help", at=tmp_path).returncode == 0
    refusal = run(path, "census", "count", at=tmp_path)
    assert refusal.returncode == 2
    assert message in refusal.stderr
    assert "the extension census of census-tools" in refusal.stderr
    assert "Traceback" not in refusal.stderr


def test_a_package_whose_module_is_gone_is_said_once(tmp_path: Path) -> None:
    path = install(tmp_path / "installed", target="nowhere:EXTENSION")
    help_result = run(path, "--help", at=tmp_path)
    assert help_result.returncode == 0
    assert (
        help_result.stderr
        == "the extension census of census-tools is ignored: there is no module nowhere\n"
    )


def test_a_package_takes_part_in_a_run_whose_config_has_its_section(tmp_path: Path) -> None:
    path = install(tmp_path / "installed")
    settings = run_forked(path, "config", "show", "--set", "census.every=2", at=tmp_path)
    assert "census:\n  every: 2" in settings.stdout
    refusal = run_forked(path, "config", "show", "--set", "census.every=x", at=tmp_path)
    assert "census.every" in refusal.stderr
    refusal = run_forked(path, "config", "show", "--set", "census.every=0", at=tmp_path)
    assert "nothing would be counted; use 1" in refusal.stderr
    result = run_forked(path, "train", tiny(tmp_path), "--set=census.every=2", at=tmp_path)
    assert result.returncode == 0, result.stderr
    events = run_forked(path, "logs", "events", "--kind", "census", at=tmp_path)
    assert events.stdout.splitlines() == ["census: 3920"] * 2
    assert "census" in run_forked(path, "logs", "plot", "--metrics", "census", at=tmp_path).stdout
    resume_result = run_forked(path, "resume", "latest", "--until", "6it", at=tmp_path)
    assert resume_result.returncode == 0, resume_result.stderr
    # where the package is not installed, its run can still be read
    listing = run_forked(tmp_path, "logs", "list", "--json", at=tmp_path)
    assert '"step": 6' in listing.stdout


def layers(run_dir: Path, step: int) -> int:
    manifest = json.loads((run_dir / "checkpoints" / f"step-{step}" / "manifest.json").read_text())
    return int(manifest["architecture"]["n_layer"])


def test_a_package_adds_an_operation_of_growth(tmp_path: Path) -> None:
    path = install(tmp_path / "installed")
    entry = "{name: census.double_layers, when: {at_step: 2}}"
    grows = [f"--set=schedule=[{entry}]", "--set=record.run_dir=grown"]
    result = run_forked(path, "train", tiny(tmp_path), *grows, at=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "census.double_layers" in run_forked(path, "logs", "events", "grown", at=tmp_path).stdout
    assert layers(tmp_path / "grown", 4) == 2
    resume_result = run_forked(path, "resume", "grown", "--until", "6it", at=tmp_path)
    assert resume_result.returncode == 0, resume_result.stderr
    grow = ("grow", "grown", "larger", "--op", "census.double_layers")
    result = run_forked(path, *grow, at=tmp_path)
    assert result.returncode == 0, result.stderr
    assert layers(tmp_path / "larger", 6) == 4
    refusal = run_forked(
        path, "train", "tiny.yaml", grows[0].replace("double", "treble"), at=tmp_path
    )
    assert "must be an operation, got 'census.treble_layers'" in refusal.stderr
    refusal = run_forked(
        path, "train", "tiny.yaml", grows[0].replace(", when", ", value: 3, when"), at=tmp_path
    )
    assert refusal.returncode == 2, refusal.stderr
    # where the package is not installed, what it did is told, and nothing is guessed
    for words in (grow, ("resume", "grown", "--until", "8it"), ("train", "tiny.yaml", grows[0])):
        refusal = run_forked(tmp_path, *words, at=tmp_path)
        assert refusal.returncode == 2, refusal.stderr
        assert "no package with the operation is installed, an extension 'census'" in refusal.stderr
        assert "Traceback" not in refusal.stderr
    assert (
        "census.double_layers"
        in run_forked(tmp_path, "logs", "events", "grown", at=tmp_path).stdout
    )


PAGES = """\
from pathlib import Path
from starlette.testclient import TestClient
from instar.extensions.board.app import dashboard_app

client = TestClient(dashboard_app(Path("runs")))
print(client.get("/extensions/census").text)
print('<a href="/extensions/census">census</a>' in client.get("/").text)
print(client.get("/extensions/other").status_code)
"""


def test_a_package_installed_by_pip_adds_a_task_and_a_page(tmp_path: Path) -> None:
    source = install(tmp_path / "source")
    shutil.rmtree(source / "census_tools-1.0.dist-info")
    (source / "pyproject.toml").write_text(PROJECT)
    path = tmp_path / "installed"
    pip = ["-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    words = [sys.executable, *pip, "--target", str(path), str(source)]
    subprocess.run(words, check=True, capture_output=True)
    result = run_forked(path, "train", tiny(tmp_path), "--set=task=census", at=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (
        "task: census"
        in run_forked(path, "config", "show", "--set=task=census", at=tmp_path).stdout
    )
    resume_result = run_forked(path, "resume", "latest", "--until", "6it", at=tmp_path)
    assert resume_result.returncode == 0, resume_result.stderr
    env = {**os.environ, "PYTHONPATH": str(path)}
    grows = "--set=schedule=[{name: census.double_layers, when: {at_step: 2}}]"
    result = run_forked(path, "train", "tiny.yaml", grows, "--set=task=census", at=tmp_path)
    assert result.returncode == 0, result.stderr
    page_result = subprocess.run(
        [forks().python, "-c", PAGES],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
        check=True,
    )
    assert page_result.stdout.splitlines() == ["<h1>2 runs</h1>", "True", "404"]


PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "census-tools"
version = "1.0"
description = "Counts parameters"

[project.entry-points."instar.extensions"]
census = "census_tools.extension:EXTENSION"

[tool.setuptools]
packages = ["census_tools"]
"""
