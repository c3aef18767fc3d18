"""What every key of a fleet's file governs changes with it: in its plan, its batch script, its search, or in a
test that is named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from instar.extensions.fleet import spec as schema
from instar.extensions.fleet.checks import make_plan
from instar.extensions.fleet.engines.slurm import batch_script
from instar.extensions.fleet.plan import ANY_MACHINE, load_fleet
from instar.extensions.fleet.spec import FleetSpec, Pruner
from instar.extensions.fleet.study import _pruner
from instar.extensions.fleet.view.live import plan_row

TESTS = Path(__file__).parents[2]
BASE = """\
name: f
matrix: {seed: [1, 2], lr: [0.1, 0.2]}
jobs: {j: {command: "echo ${seed}", ports: [http]}}
"""
PLAN = {
    "FleetSpec.name": "name=g",
    "FleetSpec.vars": "vars.seed_of=3",
    "FleetSpec.matrix": "matrix.seed=[1, 2, 3]",
    "FleetSpec.include": "include=[{seed: 9, lr: 0.9}]",
    "FleetSpec.exclude": "exclude=[{seed: 1}]",
    "FleetSpec.max_parallel": "max_parallel=1",
    "FleetSpec.run_name": "run_name=x-${seed}-${lr}",
    "FleetSpec.output_dir": "output_dir=out/${run_name}",
    "FleetSpec.first_port": "first_port=9000",
    "FleetSpec.engine": "engine=slurm",
    "FleetSpec.services": "services={s: {command: cat}}",
    "FleetSpec.jobs": "jobs={j: {command: echo}, k: {command: echo}}",
    "Process.command": "jobs.j.command=cat",
    "Process.ports": "jobs.j.ports=[http, grpc]",
    "Process.env": "jobs.j.env={A: b}",
    "Process.cwd": "jobs.j.cwd=/tmp",
    "Process.stop": "jobs.j.stop={grace: 3s}",
    "Process.resources": "jobs.j.resources={cpus: 1}",
}
SLURM = {
    "FleetSpec.slurm": "slurm.account=a",
    "SlurmOptions.partition": "slurm.partition=gpu",
    "SlurmOptions.account": "slurm.account=a",
    "SlurmOptions.constraint": "slurm.constraint=a100",
    "SlurmOptions.time": "slurm.time=2h",
    "SlurmOptions.warning": "slurm.warning=5m",
    "SlurmOptions.requeue": "slurm.requeue=false",
    "SlurmOptions.setup": "slurm.setup=[module load cuda]",
    "SlurmOptions.sbatch": "slurm.sbatch={qos: high}",
    "Resources.nodes": "jobs.j.resources.nodes=2",
    "Resources.gpus": "jobs.j.resources.gpus=2",
    "Resources.cpus": "jobs.j.resources.cpus=3",
    "Resources.memory": "jobs.j.resources.memory=3GB",
}
PRUNERS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "name": ({}, {"name": "median"}),
    "min_resource": ({}, {"min_resource": 3}),
    "max_resource": ({}, {"max_resource": 30}),
    "reduction_factor": ({}, {"reduction_factor": 5}),
    "n_startup_trials": ({"name": "median"}, {"n_startup_trials": 9}),
    "n_warmup_steps": ({"name": "median"}, {"n_warmup_steps": 9}),
}
LAUNCHED = "extensions/fleet/test_launcher.py::test_a_server_that_dies_is_noticed_and_restarted_with_its_job"
SERVED = (
    "extensions/fleet/test_real_server.py::test_transformers_serve_answers_before_its_client_starts"
)
STARTED = "extensions/fleet/test_launcher.py::test_jobs_start_when_their_server_answers_and_all_end_together"
REFUSED = "extensions/fleet/test_search.py::test_a_mistake_is_refused_with_its_line"
SEARCHED = (
    "extensions/fleet/test_search.py::test_a_sampler_learns_and_a_pruner_stops_what_falls_behind"
)
GRID = "extensions/fleet/test_search.py::test_a_grid_is_every_combination_once"
APART = "extensions/fleet/test_starts.py::test_a_service_is_ready_when_the_named_port_accepts_and_starts_are_apart"
RAY = "extensions/fleet/test_ray.py"
NAMED: Mapping[str, str] = {
    "FleetSpec.ray": f"{RAY}::test_without_ray_the_extra_is_named",
    "FleetSpec.search": SEARCHED,
    "FleetSpec.failure": "extensions/fleet/test_launcher.py::test_failures_beyond_the_policy_stop_the_rest",
    "FailurePolicy.policy": "extensions/fleet/test_launcher.py::test_failures_beyond_the_policy_stop_the_rest",
    "Process.depends_on": "extensions/fleet/test_launcher.py::test_a_server_that_hangs_is_unhealthy_after_its_retries",
    "StopPolicy.signal": "extensions/fleet/test_slurm.py::"
    "test_an_array_of_the_instances_with_what_all_processes_of_one_need",
    "StopPolicy.grace": "extensions/fleet/test_launcher.py::test_ctrl_c_asks_and_a_second_one_kills",
    "Service.healthcheck": SERVED,
    "Service.restart": LAUNCHED,
    "Healthcheck.http": STARTED,
    "Healthcheck.probe": SERVED,
    "Healthcheck.model": SERVED,
    "Healthcheck.command": STARTED,
    "Healthcheck.interval": SERVED,
    "Healthcheck.timeout": LAUNCHED,
    "Healthcheck.start_period": SERVED,
    "Healthcheck.retries": "extensions/fleet/test_launcher.py::test_a_server_that_hangs_is_unhealthy_after_its_retries",
    "RestartPolicy.policy": LAUNCHED,
    "RestartPolicy.max": LAUNCHED,
    "RestartPolicy.backoff": LAUNCHED,
    "RetryPolicy.max": "extensions/fleet/test_launcher.py::test_a_failed_job_is_retried_and_its_end_shown",
    "RetryPolicy.backoff": "extensions/fleet/test_launcher.py::test_a_failed_job_is_retried_and_its_end_shown",
    "Job.run": "extensions/fleet/test_plan.py::test_matrix_keys_are_keys_of_the_run",
    "Job.set": "extensions/fleet/test_plan.py::test_text_of_a_matrix_stays_text",
    "Job.nproc": "extensions/fleet/test_plan.py::test_a_run_on_several_nodes_is_started_by_torchrun_on_each",
    "Job.on_dependency_failure": LAUNCHED,
    "Job.retry": "extensions/fleet/test_launcher.py::test_a_failed_job_is_retried_and_its_end_shown",
    "Dimension.low": GRID,
    "Dimension.high": GRID,
    "Dimension.step": GRID,
    "Dimension.log": REFUSED,
    "Dimension.choices": GRID,
    "Search.metric": "extensions/fleet/test_search.py::test_a_trial_without_a_number_has_failed_and_the_search_goes_on",
    "Search.direction": "extensions/fleet/test_search.py::test_mistakes_of_the_runs_are_found_all_at_once",
    "Search.trials": SEARCHED,
    "Search.sampler": GRID,
    "Search.seed": "extensions/fleet/test_search.py::"
    "test_a_killed_launcher_goes_on_with_the_same_values_and_runs_nothing_twice",
    "Search.pruner": SEARCHED,
    "Search.space": SEARCHED,
    "RayCluster.address": f"{RAY}::test_what_no_node_has_is_refused_before_a_folder_is_made",
    "RayCluster.restarts": f"{RAY}::"
    "test_a_run_whose_worker_is_killed_begins_again_as_often_as_allowed_and_completes_once",
    "Healthcheck.port": APART,
    "Healthcheck.tcp": "extensions/fleet/test_starts.py::test_a_connection_is_what_tcp_asks_for",
    "FleetSpec.stagger": APART,
    "Stagger.services": APART,
    "Stagger.jobs": APART,
}


def plan_of(folder: Path, *overrides: str) -> Any:
    (folder / "fleet.yaml").write_text(BASE, encoding="utf-8")
    return make_plan(load_fleet(str(folder / "fleet.yaml"), overrides), ANY_MACHINE)


def plan_facts(plan: Any) -> Any:
    rows = [plan_row(plan, instance) for instance in plan.instances]
    return rows, plan.parallel, plan.spec.processes, dict(plan.spec.vars)


def test_each_key_changes_the_plan(tmp_path: Path) -> None:
    before = plan_facts(plan_of(tmp_path))
    assert before == plan_facts(plan_of(tmp_path))
    assert [
        key for key, override in PLAN.items() if plan_facts(plan_of(tmp_path, override)) == before
    ] == []


def test_each_key_changes_the_batch_script(tmp_path: Path) -> None:
    def render_script(*overrides: str) -> str:
        return batch_script(plan_of(tmp_path, "engine=slurm", *overrides), tmp_path, None)

    before = render_script()
    assert before == render_script()
    assert [key for key, override in SLURM.items() if render_script(override) == before] == []


@pytest.mark.parametrize("key", PRUNERS)
def test_each_key_changes_the_pruner(key: str) -> None:
    base, change = PRUNERS[key]

    def build_pruner(values: Mapping[str, Any]) -> Any:
        pruner = _pruner(Pruner.model_validate(values))
        return type(pruner), {k: v for k, v in vars(pruner).items() if not callable(v)}

    assert repr(build_pruner(base | change)) != repr(build_pruner(base))


def every_key() -> list[str]:
    models = [
        schema_class
        for schema_class in vars(schema).values()
        if isinstance(schema_class, type)
        and issubclass(schema_class, BaseModel)
        and schema_class.__module__ == FleetSpec.__module__
    ]
    return [
        f"{model.__name__}.{key}"
        for model in models
        for key in model.model_fields
        if not any(key in getattr(base, "model_fields", ()) for base in model.__bases__)
    ]


def test_what_each_key_governs_is_seen_to_change() -> None:
    covered_keys = {*PLAN, *SLURM, *NAMED, *(f"Pruner.{key}" for key in PRUNERS)}
    assert [key for key in every_key() if key not in covered_keys] == []
    assert sorted(covered_keys - {*every_key()}) == []


def test_every_named_test_exists_and_names_its_key() -> None:
    for key, test in NAMED.items():
        file, _, function = test.partition("::")
        text = (TESTS / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text, test
        assert re.search(rf"\b{key.partition('.')[2]}\b", text), (key, file)
