"""Trackers tried for real, each in a process of its own: writing through a TrackerSink, reading back with
the tool's own reader.

    python tracked.py write TOOL FOLDER FIRST LAST [wait]
    python tracked.py read TOOL FOLDER
"""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOOLS = ("tensorboard", "wandb", "trackio", "mlflow")
NAN_STEP, INFINITE_STEP = 3, 4
CONFIG = {
    "name": "demo",
    "model": {"n_layer": 4, "n_mlp": None},
    "train": {"until": ["9it"]},
    "record": {"alerts": {"webhook": "https://example.org/secret"}},
}


def loss(step: int) -> float:
    return {NAN_STEP: math.nan, INFINITE_STEP: math.inf}.get(step, 8.0 / (step + 1))


def write(tool: str, folder: Path, first: int, last: int, *, wait: bool = False) -> None:
    """Steps `first` + 1 to `last` of a run; with `wait` it neither ends nor goes on."""
    from instar.config.sections import TrackersConfig
    from instar.record.events import (
        Alert,
        OperationEvent,
        RunFinished,
        RunStarted,
        Saved,
        Stop,
        Train,
    )
    from instar.record.recorder import Recorder
    from instar.record.trackers import sink as sinks
    from instar.record.trackers.tracker import TrackedRun, configured_trackers

    sinks.FLUSH_EVERY_S = 0.1
    config = TrackersConfig.model_validate({tool: settings(tool, folder)})
    sink = sinks.TrackerSink(
        Recorder(folder / "events.jsonl"),
        configured_trackers(config),
        TrackedRun.live(folder, CONFIG),
        lambda message: print(message, file=sys.stderr),
        queue_events=100_000,
        close_wait_s=60.0,
    )
    came_from = f"step-{first}" if first else None
    sink.write(RunStarted(run_id="ab3cd", step=first, resumed_from=came_from))
    for step in range(first + 1, last + 1):
        sink.write(Train(step=step, tokens=64 * step, loss=loss(step), lr=1e-3))
    sink.write(OperationEvent(step=last, name="widen_mlp", verb="GROW", change="64→128"))
    sink.write(Saved(step=last, path=f"checkpoints/step-{last}"))
    sink.write(Alert(step=last, name="divergence", message="it rises"))
    if wait:
        signal.pause()  # not for its stdin: who kills it closes that too, perhaps first
    sink.write(Stop(step=last, reason="9it"))
    sink.write(RunFinished(step=last, loss=loss(last), best_loss=0.5))
    sink.close()


def write_media(tool: str, folder: Path) -> None:
    """An image and a table, as a run records them."""
    import numpy as np

    from instar.config.sections import TrackersConfig
    from instar.record.events import ImageEvent, RunFinished, RunStarted, TableEvent
    from instar.record.media import save_image
    from instar.record.trackers.tracker import TrackedRun, configured_trackers

    path = save_image(folder, "val", 7, np.zeros((2, 3, 3), dtype=np.uint8))
    (tracker,) = configured_trackers(TrackersConfig.model_validate({tool: settings(tool, folder)}))
    tracker.start(TrackedRun.live(folder, CONFIG))
    tracker.take(RunStarted(run_id="ab3cd", time=1.0))
    tracker.take(
        ImageEvent(step=7, time=2.0, name="a/..", split="val", path=path, width=3, height=2)
    )
    # a record is not trusted: what it names elsewhere is not sent
    secret = folder / "secret.png"
    secret.write_bytes((folder / path).read_bytes())
    tracker.take(ImageEvent(step=7, time=2.0, name="other", split="val", path="secret.png"))
    rows = (("x|y", 1.5), (None, 2))
    tracker.take(
        TableEvent(step=7, time=3.0, name="worst", split="val", columns=("a", "b"), rows=rows)
    )
    tracker.take(RunFinished(step=7, time=4.0))
    tracker.finish("finished")


def read_media(tool: str, folder: Path) -> list[str]:
    """What is there of them, in the tool's own words."""
    if tool == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard")).Reload()
        texts = events.Tensors("val/worst")[0].tensor_proto.string_val[0].decode().splitlines()
        return [*events.Tags()["images"], *texts]
    if tool == "wandb":
        (file,) = folder.glob("wandb/offline-run-*/*.wandb")
        return [
            f"{item.nested_key[0]} {json.loads(item.value_json)}"
            for record in wandb_records(file)
            if record.WhichOneof("record_type") == "history"
            for item in record.history.item
            if [*item.nested_key][1:] == ["_type"]
        ]
    client, (run,) = mlflow_runs(folder)
    names = ("val/a/__", "val/worst", "val/other")
    return [f.path for name in names for f in client.list_artifacts(run.info.run_id, name)]


def settings(tool: str, folder: Path) -> dict[str, str]:
    parent = folder.parent
    return {
        "trackio": {"dir": str(parent / "trackio")},
        "mlflow": {"uri": str(parent / "mlruns")},
    }.get(tool, {})


def read(tool: str, folder: Path) -> dict[str, Any]:
    """What the tool's own reader finds: `runs`, `points` of the loss, `tokens`, `config`, `notes`,
    `final` and whatever else is there."""
    return {
        "tensorboard": read_tensorboard,
        "wandb": read_wandb,
        "trackio": read_trackio,
        "mlflow": read_mlflow,
    }[tool](folder)


def read_tensorboard(folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    size_guidance = {"scalars": 0, "tensors": 0}
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance=size_guidance).Reload()
    texts = {
        tag: [(event.step, make_ndarray(event.tensor_proto).item().decode()) for event in tensors]
        for tag in events.Tags()["tensors"]
        if not tag.startswith("_") and (tensors := events.Tensors(tag))
    }
    scalars = {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in ("loss", "at/tokens")
    }
    return {
        "runs": 1,
        "points": scalars["loss"],
        "tokens": scalars["at/tokens"],
        "config": texts.pop("config")[-1][1],
        "final": [text for _, text in texts.pop("finished", [])],
        "notes": texts,
    }


def read_wandb(folder: Path) -> dict[str, Any]:
    """Of all of its folders, in the order in which `wandb sync` would send them."""
    rows: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    final: dict[str, Any] = {}
    ids, alerts, kinds = set(), [], set()
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    for file in files:
        for record in wandb_records(file):
            kind = record.WhichOneof("record_type")
            kinds.add(kind)
            if kind == "run":
                ids.add(record.run.run_id)
                config |= {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
            elif kind == "history":
                items = record.history.item
                rows.append(
                    {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in items
                    }
                )
            elif kind == "summary":
                final |= {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.summary.update
                }
            elif kind == "alert":
                alerts.append((record.alert.title, record.alert.text))
    number = {"NaN": math.nan, "Infinity": math.inf}
    return {
        "runs": len(ids),
        "points": [
            (row["step"], number.get(row["loss"], row["loss"])) for row in rows if "loss" in row
        ],
        "tokens": [(row["step"], row["at/tokens"]) for row in rows if "loss" in row],
        "config": config,
        "final": final,
        "notes": {
            "operation": [
                (r["step"], r["events/operation"]) for r in rows if "events/operation" in r
            ],
            "alert": alerts,
        },
        "folders": len(files),
        "kinds": sorted(kinds),
    }


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a transaction log: LevelDB's log format behind seven bytes of W&B's own."""
    from wandb.proto import wandb_internal_pb2

    data, place, payload = file.read_bytes(), 7, b""
    block, head = 32768, 7
    while place + head <= len(data):
        if (room := block - place % block) < head:
            place += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        part = data[place + head : place + head + size]
        if kind == 0 or len(part) < size:
            return
        place += head + size
        payload += part
        if kind in (1, 4):  # the whole of it, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            payload = b""
            yield record


def read_trackio(folder: Path) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(folder.parent / "trackio")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(trackio.Api().runs("instar"))
    (run,) = runs
    rows = SQLiteStorage.get_logs("instar", run.name, run_id=run.id)
    return {
        "runs": len(runs),
        "points": [(row["step"], row["loss"]) for row in rows if "loss" in row],
        "tokens": [(row["step"], row["at/tokens"]) for row in rows if "loss" in row],
        "config": run.config,
        "final": {key: value for row in rows for key, value in row.items() if "final/" in key},
        "notes": {
            "operation": [(a["step"], a["text"]) for a in run.alerts() if "GROW" in a["title"]],
            "alert": [(a["step"], a["text"]) for a in run.alerts() if a["title"] == "divergence"],
        },
    }


def mlflow_runs(folder: Path) -> tuple[Any, list[Any]]:
    """A client, and all runs of the folder beside."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(folder.parent / "mlruns").as_uri())
    experiments = client.search_experiments(filter_string="name = 'instar'")
    return client, client.search_runs([experiment.experiment_id for experiment in experiments])


def read_mlflow(folder: Path) -> dict[str, Any]:
    client, runs = mlflow_runs(folder)
    (run,) = runs
    history = {
        name: [
            (metric.step, metric.value)
            for metric in client.get_metric_history(run.info.run_id, name)
        ]
        for name in ("loss", "at/tokens")
    }
    tags = run.data.tags
    return {
        "runs": len(runs),
        "points": history["loss"],
        "tokens": history["at/tokens"],
        "config": run.data.params,
        "final": {k: v for k, v in run.data.metrics.items() if "final/" in k}
        | {"status": run.info.status},
        "notes": {
            kind: [
                (int(key.split()[1]), value) for key, value in tags.items() if key.startswith(kind)
            ]
            for kind in ("operation", "alert")
        },
    }


def process(*arguments: object) -> subprocess.Popen[str]:
    """This file as a process; a network would be of no use to it."""
    from forks import forks  # not in that process

    nowhere = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [str(forks().python), __file__, *map(str, arguments)],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=os.environ | nowhere,
    )


def write_run(*arguments: object, command: str = "write") -> None:
    """Write in a process that ends; it says nothing at all."""
    output = process(command, *arguments).communicate(timeout=120)
    assert output == ("", ""), output


def read_back(tool: str, folder: Path, command: str = "read") -> Any:
    """Read in a process, since a tool looks up its folder when it is imported."""
    with process(command, tool, folder) as reader:
        output, complaint = reader.communicate(timeout=120)
    assert reader.returncode == 0, complaint
    return json.loads(output.splitlines()[-1])


def read_when(tool: str, folder: Path, last: int) -> dict[str, Any]:
    """What can be read as soon as step `last` can."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            content = read_back(tool, folder)
        except (AssertionError, ValueError):  # not there yet
            continue
        if content["points"] and content["points"][-1][0] >= last and content["notes"].get("alert"):
            return content
    raise TimeoutError(f"{tool} never held step {last}")


if __name__ == "__main__":
    command, tool, folder, *options = sys.argv[1:]
    if command == "write":
        write(tool, Path(folder), int(options[0]), int(options[1]), wait="wait" in options)
    elif command == "write-media":
        write_media(tool, Path(folder))
    elif command == "count":
        print(len(mlflow_runs(Path(folder))[1]))
    elif command == "read-media":
        print(json.dumps(read_media(tool, Path(folder))))
    else:
        print(json.dumps(read(tool, Path(folder))))
