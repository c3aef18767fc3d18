"""Fleet files: the table of instances, and mistakes that are refused before anything starts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fleets import MACHINE, FleetPlace, fleet_error, plan_fleet

from instar.cli.main import main
from instar.config.load import load_config
from instar.extensions.fleet import commands, doctor
from instar.extensions.fleet.checks import make_plan, with_gpus_of_runs
from instar.extensions.fleet.folder import as_test, reopen_fleet
from instar.extensions.fleet.placement import LOCKS_VARIABLE
from instar.extensions.fleet.plan import (
    ANY_MACHINE,
    Machine,
    argv_of,
    expand,
    load_fleet,
    sets_of,
    variables_of,
)

EXAMPLES = Path(__file__).parents[3] / "examples" / "fleet"

GRPO = """\
name: gsm8k
matrix: {seed: [42, 1337, 2024, 9999]}
services:
  vllm:
    command: sleep ${ports.http}
    resources: {gpus: 1}
    ports: [http]
jobs:
  training:
    command: sleep ${seed} ${services.vllm.ports.http}
    resources: {gpus: 1}
    depends_on: {vllm: service_started}
"""


def test_the_plan_is_the_table_of_eight_gpus_and_four_seeds(place: FleetPlace) -> None:
    (place.path / "fleet.yaml").write_text(GRPO)
    code, output = place.run("plan", "fleet.yaml", "--gpus", "8", "--json")
    assert code == 0, output
    rows = json.loads(output)["instances"]
    keys = ("instance", "vllm gpu", "training gpu", "vllm http", "seed")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        (0, 0, 1, 8000, 42),
        (1, 2, 3, 8001, 1337),
        (2, 4, 5, 8002, 2024),
        (3, 6, 7, 8003, 9999),
    ]


def test_the_examples_can_be_planned(place: FleetPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers and scripts that they name are replaced by stubs."""
    stub = place.path / "bin" / "vllm"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    for path in EXAMPLES.glob("*.yaml"):
        code, output = place.run("plan", path, "--gpus", "8", "--json")
        assert code == 0, output
        count = 40 if path.stem == "search" else 4
        assert len(json.loads(output)["instances"]) == count
    first = json.loads(place.run("plan", EXAMPLES / "grpo.yaml", "--gpus", "8", "--json")[1])
    assert first["instances"][0]["output_dir"] == "outputs/trl_gsm8k_instance0_seed42"


def test_what_is_not_installed_is_said_by_plan_and_refused_by_up(place: FleetPlace) -> None:
    text = "name: far\njobs: {job: {command: no-such-server --port 1}}\n"
    (place.path / "fleet.yaml").write_text(text)
    message = "there is no command 'no-such-server'"
    code, output = place.run("plan", "fleet.yaml")
    assert code == 0, output
    assert f"{message}; `up` needs it: install it" in output
    code, output = place.run("doctor", "fleet.yaml", "--json")
    assert code == 4
    assert f"{message}; install it" in output
    code, output = place.run("up", "fleet.yaml")
    assert code == 2
    assert message in output
    assert not (place.path / "fleets").exists()


@pytest.mark.parametrize(("free", "ok"), [(0, False), (19 << 30, False), (21 << 30, True)])
def test_a_disk_that_holds_locks_and_outputs_needs_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, ok: bool
) -> None:
    """And so does one that holds outputs alone; one that holds only locks does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "locks"))  # before the outputs by name
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    plan = plan_fleet(
        tmp_path, "name: x\noutput_dir: outputs/${index}\njobs: {job: {command: [ls]}}\n"
    )
    disks = [
        check for check in doctor.diagnose_fleet(plan, (), ()) if check.what.startswith("disk")
    ]
    assert [check.ok for check in disks] == [ok]


def test_text_of_a_matrix_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    texts = [
        "01",
        "1e3",
        "0x10",
        "1_000",
        "true",
        "null",
        "~",
        "",
        "a: b",
        "[x]",
        "- y",
        "it's",
        "a, b",
    ]
    plan = plan_fleet(
        tmp_path,
        f"""\
        name: texts
        matrix: {{record.sample_prompt: {json.dumps(texts)}}}
        vars: {{steps: 7, digits: "7"}}
        run_name: t${{index}}
        jobs:
          train:
            run: run.yaml
            set: {{name: "007", train.until: ["${{steps}}it"], seed: "${{steps}}", data.source: "${{digits}}"}}
        """,
    )
    for text, instance in zip(texts, plan.instances, strict=True):
        variables = variables_of(instance, ["record.sample_prompt"])
        config = load_config(
            "run.yaml", sets_of(plan.spec.jobs["train"], variables), checks=()
        ).config
        assert config.record.sample_prompt == text
        assert (config.name, config.train.until, config.seed) == ("007", ("7it",), 7)
        assert config.data.source == "7"


def test_include_and_exclude(tmp_path: Path) -> None:
    plan = plan_fleet(
        tmp_path,
        """\
        name: sweep
        matrix: {seed: [1, 2], rate: [0.1, 0.2]}
        exclude: [{seed: 2, rate: 0.1}]
        include: [{seed: 3, rate: 0.5}]
        jobs: {job: {command: "true ${seed} ${rate}"}}
        """,
    )
    assert [tuple(instance.values.values()) for instance in plan.instances] == [
        (1, 0.1),
        (1, 0.2),
        (2, 0.2),
        (3, 0.5),
    ]


def test_instances_share_what_the_machine_has(tmp_path: Path) -> None:
    assert plan_fleet(tmp_path, GRPO).parallel == 4
    assert plan_fleet(tmp_path, GRPO, machine=Machine(5, 64, 1 << 40)).parallel == 2
    assert plan_fleet(tmp_path, GRPO, "max_parallel=3").parallel == 3
    assert (
        plan_fleet(
            tmp_path, GRPO.replace("gpus: 1", "memory: 16GiB"), machine=Machine(0, 2, 100 << 30)
        ).parallel
        == 3
    )
    unnamed = GRPO.replace("resources: {gpus: 1}", "")
    assert plan_fleet(tmp_path, unnamed, machine=Machine(0, 2, 1 << 30)).parallel == 2
    assert plan_fleet(tmp_path, unnamed, "max_parallel=4", machine=Machine(0, 2, 1)).parallel == 4


def test_words_are_split_before_variables_are_replaced(tmp_path: Path) -> None:
    plan = plan_fleet(
        tmp_path,
        """\
        name: words
        vars: {prompt: "two words; rm -rf /"}
        jobs: {job: {command: "echo ${prompt} '$${HOME}'"}}
        """,
    )
    job = plan.spec.jobs["job"]
    argv = argv_of("job", job, plan.instances[0].variables)
    assert argv == ["echo", "two words; rm -rf /", "${HOME}"]
    assert expand("$$ ${a}", {"a": True}) == "$ true"


MISTAKES = {
    "more GPUs than exist": ("resources: {gpus: 1}", "resources: {gpus: 9}", ":6:", "10 gpus"),
    "an unknown variable": ("${seed} ", "${sede} ", ":10:", "did you mean '${seed}'"),
    "an unknown port": ("ports.http}\n    res", "ports.htp}\n    res", ":5:", "${ports.http}"),
    "a service that is not there": ("{vllm: serv", "{vlm: serv", ":12:", "did you mean 'vllm'"),
    "a command that does not exist": ("sleep ${seed}", "slep ${seed}", ":10:", "'slep'"),
    "an unknown key": ("depends_on:", "depend_on:", ":12:", "did you mean 'depends_on'"),
    "a wrong condition": ("service_started", "service_stated", ":12:", "service_started"),
    "a value of another type": ("gpus: 1", "gpus: one", ":6:", "whole number"),
    "an open brace": ("${seed} ", "${seed ", ":10:", "without a '}'"),
    "a file that is no YAML": ("matrix: {", "matrix: {{", ":2:", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_with_its_line(tmp_path: Path, mistake: str) -> None:
    old, new, line, words = MISTAKES[mistake]
    assert old in GRPO
    text = fleet_error(tmp_path, GRPO.replace(old, new, 1))
    assert line in text
    assert words in text


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = fleet_error(
        tmp_path,
        """\
        name: many
        matrx: {seed: [1]}
        max_parallel: none
        jobs:
          one: {command: "true", stop: {signal: SIGTREM, grace: soon}}
        """,
    )
    for words in ("matrx", "max_parallel", "no such signal", "a duration is written"):
        assert words in text


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("jobs: {a: {command: x, depends_on: {b: completed}}, b: {command: x, depends_on: {a: completed}}}", "circular dependency between a, b"),
        ("services: {s: {command: 'true', healthcheck: {http: /health}}}", "needs a port"),
        ("services: {s: {command: 'true', healthcheck: {}}}", "checks nothing"),
        ("services: {s: {command: 'true', ports: [a], healthcheck: {http: /, port: b}}}", "no port 'b'"),
        ("services: {s: {command: 'true', ports: [a], healthcheck: {command: x, port: a}}}", "a command is not told the port"),
        ("services: {s: {command: 'true', ports: [a], healthcheck: {tcp: true, model: m}}}", "only a probe names a model"),
        ("services: {s: {command: 'true', ports: [a], healthcheck: {tcp: true, timeout: 0s}}}", "is longer than 0s"),
        ("services: {s: {command: 'true', ports: [a], healthcheck: {tcp: true, interval: 0s}}}", "is longer than 0s"),
        ("jobs: {j: {}}", "needs a command or a run"),
        ("jobs: {j: {command: 'true', set: {a: 1}}}", "belong to a run"),
        ("matrix: {seed: [1, 2]}\noutput_dir: same\njobs: {j: {command: 'true'}}", "the same output_dir"),
        ("matrix: {seed: [1, 2]}\nrun_name: same\njobs: {j: {command: 'true'}}", "the same run_name"),
        ("run_name: a/b\njobs: {j: {command: 'true'}}", "cannot name a folder"),
        ("matrix: {name: [1]}\njobs: {j: {command: 'true'}}", "a meaning of its own"),
        ("vars: {gpus: 4}\njobs: {j: {command: 'true ${gpus}'}}", "'gpus' has a meaning of its own"),
        ("vars: {index: 4}\njobs: {j: {command: 'true ${index}'}}", "'index' has a meaning of its own"),
        ("matrix: {attempt: [1]}\njobs: {j: {command: 'true'}}", "'attempt' has a meaning of its own"),
        ("services: {s: {command: x, ports: [a], healthcheck: {http: '/${modle}'}}}", "${modle} in services.s.healthcheck.http"),
        ("services: {s: {command: x, ports: [a], healthcheck: {probe: completion, model: '${m}'}}}", "unknown variable ${m}"),
        ("services: {s: {command: x, healthcheck: {command: 'true ${m}'}}}", "unknown variable ${m}"),
        ("services: {s: {command: x, healthcheck: {command: \"echo '\"}}}", "cannot be split into words"),
        ("services: {s: {command: x, healthcheck: {command: no-such-probe}}}", "no command 'no-such-probe'"),
        ("matrix: {seed: [1]}\nexclude: [{seed: 1}]\njobs: {j: {command: 'true'}}", "no combination"),
        ("matrix: {seed: [1]}\nexclude: [{sed: 1}]\njobs: {j: {command: 'true'}}", "did you mean 'seed'"),
        ("matrix: {seed: [1]}\ninclude: [{sed: 1}]\njobs: {j: {command: 'true'}}", "not the keys"),
        ("matrix: {seed: []}\njobs: {j: {command: 'true'}}", "no values"),
        ("", "at least one job or service"),
        ("jobs: {j: {command: 'true', resources: {nodes: 2}}}", "jobs.j needs 2 nodes, and there is one"),
        ("engine: ray\nservices: {s: {command: x, resources: {nodes: 2}}}", "a service runs on one node"),
        ("engine: slum\njobs: {j: {command: 'true'}}", "did you mean 'slurm'"),
        ("jobs: {j: {command: 'true ${node_rank}'}}", "unknown variable ${node_rank}"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(tmp_path: Path, lines: str, words: str) -> None:
    assert words in fleet_error(
        tmp_path, f"name: wrong\n{lines}\n".replace("command: x", "command: sh")
    )


RUN = """\
model: {n_layer: 1, n_head: 1, n_embd: 8, context: 8}
data: {source: text.txt, tokenizer: byte}
train: {until: 2it}
"""


def test_matrix_keys_are_keys_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    sweep = """\
        name: sweep
        matrix: {seed: [1, 2], optimizer.lr: [0.001, 0.01]}
        run_name: s${seed}-lr${optimizer.lr}
        jobs: {train: {run: run.yaml, set: {record.log_interval: 1}}}
        """
    plan = plan_fleet(tmp_path, sweep)
    assert len(plan.instances) == 4
    text = fleet_error(
        tmp_path,
        sweep.replace(
            "matrix: {seed: [1, 2], optimizer.lr:", "matrix: {seed: [1, 2], optimizer.rl:"
        ).replace("{optimizer.lr}", "{seed}-${index}"),
    )
    assert "'optimizer.rl' is no key of run.yaml" in text
    assert ":2:" in text
    assert "optimizer.lr must be" in fleet_error(tmp_path, sweep.replace("0.01]", "-1]"))
    assert "unknown key 'log_intrval'" in fleet_error(
        tmp_path, sweep.replace("log_interval", "log_intrval")
    )
    assert "no such file" in fleet_error(tmp_path, sweep.replace("run: run.yaml", "run: rum.yaml"))


@pytest.mark.parametrize(
    ("lines", "n_gpus", "parallel"),
    [
        ("jobs: {a: {run: run.yaml}}", [1], 8),
        ("jobs: {a: {run: run.yaml, set: {name: '${run_name}'}, nproc: 2}}", [2], 4),
        ("jobs: {a: {run: run.yaml, set: {parallel.world_size: 4}}}", [4], 2),
        ("jobs: {a: {run: run.yaml}, b: {run: run.yaml, set: {device: cpu}}}", [1, 0], 8),
        ("search: {trials: 40, space: {w: {low: 1, high: 4}}}\njobs: {a: {run: run.yaml, set: {train.batch_size: '${w}'}}}", [1], 8),
        ("jobs: {a: {run: run.yaml, set: {device: cpu}}}", [0], 64),
        ("jobs: {a: {run: run.yaml, set: {device: 'cuda:3'}}, b: {run: run.yaml}}", [0, 0], 64),
        ("jobs: {a: {run: run.yaml, set: {parallel.devices: [3]}}}", [0], 64),
        ("jobs: {a: {run: run.yaml, resources: {gpus: 0}}}", [0], 64),
        ("jobs: {a: {run: run.yaml}, b: {run: run.yaml, resources: {gpus: 1}}}", [0, 1], 8),
        ("jobs: {a: {run: run.yaml}, b: {command: 'true'}}", [0, 0], 64),
        ("matrix: {parallel.world_size: [1, 2]}\njobs: {a: {run: run.yaml}}", [0], 2),
        ("engine: ray\njobs: {a: {run: run.yaml}}", [0], 64),
    ],
)  # fmt: skip
def test_runs_that_name_no_gpus_take_one_for_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, n_gpus: list[int], parallel: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    varied = "" if "matrix" in lines or "search" in lines else f"matrix: {{seed: {[*range(64)]}}}\n"
    (tmp_path / "fleet.yaml").write_text(f"name: shared\n{varied}{lines}\n")
    loaded_config = with_gpus_of_runs(load_fleet("fleet.yaml"), MACHINE)
    plan = make_plan(loaded_config, MACHINE)
    assert [job.resources.gpus for job in plan.spec.jobs.values()] == n_gpus
    assert plan.parallel == parallel
    no_gpus = replace(MACHINE, gpus=0)
    loaded_config = load_fleet("fleet.yaml")
    assert with_gpus_of_runs(loaded_config, no_gpus) is loaded_config


def test_the_gpus_of_runs_are_said_and_kept_for_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr(commands, "_run", lambda *_: 0)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "text.txt").write_text("text")
    text = "name: own\nmatrix: {seed: [1, 2, 3]}\njobs: {a: {run: run.yaml}}\n"
    (tmp_path / "fleet.yaml").write_text(text)
    for name in ("plan", "doctor", "up"):
        main(["fleet", name, "fleet.yaml", "--gpus", "2"])
        output, said = capsys.readouterr()
        assert "jobs.a: 1 GPU for each instance" in said
        assert "resources: {gpus: 0} shares them" in said
        assert name != "plan" or "A GPU" in output
        assert name != "doctor" or "2 free (pretended)" in output
    spec = reopen_fleet(Path("fleets/own")).loaded_config.spec
    assert spec.jobs["a"].resources.gpus == 1


@pytest.mark.parametrize(
    ("variation", "sets", "words"),
    [
        ("matrix: {optimizer.lr: [1e-3]}", "{optimizer.lr: 5e-4}", "'optimizer.lr' is in matrix and"),
        ("include: [{seed: 1}]", "{seed: 2}", "'seed' is in matrix and in jobs.train.set"),
        ("search: {trials: 2, space: {seed: {low: 1, high: 9}}}", "{seed: 2}", "is in search.space and"),
        ("matrix: {seed: [1]}", "{record.run_dir: mine}", "'record.run_dir' is set by the fleet"),
        ("matrix: {resume: [never]}", "{}", "'resume' is set by the fleet"),
    ],
)  # fmt: skip
def test_no_value_of_a_run_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variation: str, sets: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    text = f"name: twice\n{variation}\njobs: {{train: {{run: run.yaml, set: {sets}}}}}\n"
    assert words in fleet_error(tmp_path, text)


def test_a_quick_test_ends_before_the_steps_of_the_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    path = tmp_path / "fleet.yaml"
    path.write_text("name: t\nmatrix: {train.until: [9it]}\njobs: {train: {run: run.yaml}}\n")
    plan = make_plan(as_test(load_fleet(str(path)), 2), Machine(0, 8, 1 << 40))
    variables = variables_of(plan.instances[0], ["train.until"])
    sets = sets_of(plan.spec.jobs["train"], variables)
    assert load_config("run.yaml", sets, checks=()).config.train.until == ("2it",)


def test_what_is_known_at_the_start_may_be_set_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    text = """\
        name: served
        services: {server: {command: sleep 9, ports: [http]}}
        jobs:
          train:
            run: run.yaml
            ports: [own]
            resources: {gpus: 2}
            set: {name: "try-${attempt}", data.source: "${gpus}", seed: "${ports.own}", data.seed: "${services.server.ports.http}"}
        """
    plan_fleet(tmp_path, text)
    assert "must be" in fleet_error(tmp_path, text.replace('seed: "${ports', 'seed: "-${ports'))


def test_a_run_on_several_nodes_is_started_by_torchrun_on_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    plan = plan_fleet(
        tmp_path,
        """\
        name: wide
        engine: slurm
        jobs: {train: {run: run.yaml, resources: {nodes: 2, gpus: 8}}}
        """,
        machine=ANY_MACHINE,
    )
    node_variables = {"nodes": 2, "node_rank": 1, "master_addr": "node7", "master_port": 8000}
    variables = {**plan.instances[0].variables, **node_variables}
    words = argv_of("train", plan.spec.jobs["train"], variables, "run.yaml")
    assert words[1:11] == [
        "-m",
        "torch.distributed.run",
        "--node-rank=1",
        "--master-addr=node7",
        "--master-port=8000",
        "--nnodes=2",
        "--nproc-per-node=8",
        "-m",
        "instar.train",
        "run.yaml",
    ]
    assert "record.run_dir=runs/wide-0" in words
    assert "--nproc" not in words


def test_a_second_launcher_in_one_folder_is_refused(place: FleetPlace) -> None:
    place.write(
        "name: twice\njobs: {job: {command: [sh, -c, 'until test -e go; do sleep 0.1; done']}}\n"
    )
    first = place.start("up", "fleet.yaml")
    status = place.wait(
        "twice", lambda snapshot: snapshot["launcher"] is not None and snapshot["instances"]
    )
    code, output = place.run("resume", "twice")
    assert code == 2
    assert f"this fleet is running (launcher {status['launcher']})" in output
    (place.path / "go").touch()
    assert first.wait(60) == 0
    first.communicate()
