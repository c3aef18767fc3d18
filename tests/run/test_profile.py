"""`--profile`: a trace of some steps, and the same run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import science
import torch
from tiny_run import codes, events, output_of, weights

from instar.run.output import profile
from instar.run.output.profile import StepProfiler

SETTINGS = (
    "train.until=[8it]",
    "early_stopping.rules=[]",
    "checkpoint.on_best=false",
    "test.at_end=false",
)


def steps_of(trace: Path) -> int:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    step_events = [event for event in events if event.get("name") == profile._OUTSIDE]
    return sum(event["cat"] == "user_annotation" for event in step_events)


def test_each_rank_writes_a_trace_and_no_number_changes(tmp_path: Path) -> None:
    place = science.place(tmp_path)
    sets = [word for text in SETTINGS for word in ("--set", text)]
    runs = {"plain": (), "profiled": ("--profile", "2it")}
    for name, words in runs.items():
        children = place.instar(
            "train", "run.yaml", "--set", f"record.run_dir={name}", *sets, *words, ranks=2
        )
        assert codes(children) == [0, 0], output_of(children)
    assert "open profiled/profile/rank_0.json.gz" in output_of(children)
    assert "aten::addmm" in output_of(children)
    assert weights(tmp_path / "profiled", 8) == weights(tmp_path / "plain", 8)
    losses = [[event["loss"] for event in events(tmp_path / name, "train")] for name in runs]
    assert losses[0] == losses[1]
    for rank in range(2):
        assert steps_of(tmp_path / "profiled" / "profile" / f"rank_{rank}.json.gz") == 2


def test_traces_are_bounded_and_a_run_that_ends_early_writes_what_it_has(tmp_path: Path) -> None:
    messages: list[str] = []

    def profile_steps(steps: int, run_steps: int, name: str) -> Path:
        profiler = StepProfiler(
            steps, tmp_path / name / "t.json.gz", torch.device("cpu"), messages.append
        )
        (tmp_path / name).mkdir()
        for _ in range(run_steps):
            with profiler.step():
                torch.ones(8) @ torch.ones(8)
        profiler.close()
        return profiler.trace

    max_events, profile.MAX_EVENTS = profile.MAX_EVENTS, 1
    try:
        assert steps_of(profile_steps(5, 20, "bounded")) == 1
    finally:
        profile.MAX_EVENTS = max_events
    assert "profiled 1 of 5 steps" in messages[-1]
    assert steps_of(profile_steps(5, 6, "cut")) == 2
    assert "profiled 2 of 5 steps" in messages[-1]
    assert not profile_steps(5, 4, "short").exists()
    assert "nothing was profiled" in messages[-1]
