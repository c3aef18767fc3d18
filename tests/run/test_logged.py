"""What a task's code logs is recorded, exactly, on any number of ranks and after a resume."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import science
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from tiny_run import Place, codes, events, output_of

from instar.data.split import divide_samples
from instar.distributed.world import World
from instar.extensions import built_in
from instar.logs.read.record import read_record
from instar.record.media import read_image, to_png
from instar.record.rundir import RunDir
from instar.tasks.images import to_pixels
from instar.tasks.logged import Logged, log, log_image, recording, to_table, weighted

ALONE = World(0, 0, 1, torch.device("cpu"), "none")
SETTINGS = (
    "task=hooked:Logging",
    "train.until=[12it]",
    "record.log_interval=5",
    "test.at_end=false",
)
NAMES = {"number", "size", "seen", "lowest", "highest", "latest"}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return science.place(tmp_path)


def numbers(run_dir: Path, kind: str) -> dict[int, dict[str, float]]:
    return {e["step"]: {n: e["extra"][n] for n in NAMES} for e in events(run_dir, kind)}


def test_numbers_are_the_same_on_any_number_of_ranks_and_after_a_resume(place: Place) -> None:
    by_ranks = {}
    for ranks in (1, 2, 3):
        run_dir = place.path / f"w{ranks}"
        children = place.train(run_dir, *SETTINGS, ranks=ranks)
        assert codes(children) == [0] * ranks, output_of(children)
        by_ranks[ranks] = numbers(run_dir, "train"), numbers(run_dir, "eval")
    train_rows, eval_rows = by_ranks[1]
    assert list(train_rows) == [1, 5, 10, 12]
    # 36 samples to train on: batches of 8, and one of 4 at the end of the epoch
    assert [row["seen"] for row in train_rows.values()] == [8, 28, 36, 16]
    split = divide_samples(80, val=21, test=23, seed=1337)
    assert {row["number"] for row in eval_rows.values()} == {np.mean(split["val"])}
    first = 8 * train_rows[1]["number"] + 28 * train_rows[5]["number"]
    assert first == pytest.approx(np.sum(split["train"]))
    assert 36 * train_rows[10]["number"] == pytest.approx(np.sum(split["train"]))
    for row in (*train_rows.values(), *eval_rows.values()):
        assert row["lowest"] <= row["number"] <= row["highest"]
    assert {row["seen"] for row in eval_rows.values()} == {21}
    for ranks in (2, 3):
        for actual, expected in zip(by_ranks[ranks], by_ranks[1], strict=True):
            for step, row in expected.items():
                same = NAMES - {"latest", "size"}
                assert {n: actual[step][n] for n in same} == {n: row[n] for n in same}

    parts = place.path / "parts"
    for until in (7, 12):
        settings = (*SETTINGS, f"train.until=[{until}it]", "resume=auto", "early_stopping.rules=[]")
        children = place.train(parts, *settings, ranks=2)
        assert codes(children) == [0, 0], output_of(children)
    assert numbers(parts, "train")[10] == by_ranks[2][0][10]


def test_the_first_image_and_table_of_a_record_are_kept(place: Place) -> None:
    run_dir = place.path / "run"
    children = place.train(run_dir, *SETTINGS, ranks=2)
    assert codes(children) == [0, 0], output_of(children)
    images = events(run_dir, "image")
    assert {(e["split"], e["name"]) for e in images} == {
        (split, name) for split in ("train", "val") for name in ("gray/../x", "color")
    }
    (first,) = [e for e in images if (e["split"], e["step"], e["name"]) == ("train", 1, "color")]
    content = read_image(run_dir, first["path"])
    assert content is not None
    pixels = np.asarray(Image.open(io.BytesIO(content)))
    assert pixels.shape == (first["height"], first["width"], 3) == (3, 5, 3)
    assert pixels[0, 0].tolist() == [255, 128, 0]
    assert {path.parent for path in run_dir.rglob("*.png")} == {run_dir / "media"}
    for table in events(run_dir, "table"):
        assert table["columns"] == ["number", "loss"]
        assert table["rows"][0][1] >= table["rows"][1][1]

    children = place.instar("logs", "events", run_dir, "--kind", "image", "--kind", "table")
    assert codes(children) == [0], output_of(children)
    assert re.search(r"image gray/../x \(train\): 2 . 4, media/train-1-", output_of(children))
    assert 'table worst (val): 2 rows, the first {"number": ' in output_of(children)

    record = read_record(RunDir(run_dir))
    assert "val/seen" in record.metrics
    if "board" not in built_in():
        return
    from instar.extensions.board.sections import page_sections

    sections = {section.get("title"): section for section in page_sections("results", record)}
    assert sections["Images"]["items"][0]["src"].startswith("data:image/png;base64,")
    last = max(e["step"] for e in events(run_dir, "table") if e["split"] == "val")
    assert sections[f"worst (val), step {last}"]["heads"] == ["number", "loss"]


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 1), (4, 3, 3), (4, 3, 4)])
@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "?"])
def test_an_image_is_read_back_as_it_was(shape: tuple[int, ...], dtype: str) -> None:
    image: NDArray[Any] = np.random.default_rng(0).integers(0, 256, shape)
    image = image > 99 if dtype == "?" else image / 255 if dtype[0] == "f" else image
    pixels = to_pixels("x", image.astype(dtype))
    expected = np.rint(image.astype(float) * (1 if dtype == "u1" else 255))
    actual = np.asarray(Image.open(io.BytesIO(to_png(pixels))))
    np.testing.assert_array_equal(actual.reshape(shape), expected)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16", "bfloat16"])
def test_channels_may_come_first_as_in_torch(channels: int, dtype: str) -> None:
    values = torch.randint(0, 256, (channels, 5, 7), generator=torch.Generator().manual_seed(1))
    image = values.to(torch.uint8) if dtype == "uint8" else (values / 255).to(getattr(torch, dtype))
    expected = values.numpy() if dtype == "uint8" else np.rint(255 * image.double().numpy())
    for tensor in (image, image.requires_grad_() if dtype != "uint8" else image):
        np.testing.assert_array_equal(to_pixels("x", tensor), expected.transpose(1, 2, 0))
    last = to_pixels("x", image.permute(1, 2, 0))
    np.testing.assert_array_equal(last, expected.transpose(1, 2, 0))


def test_where_both_layouts_fit_channels_are_last() -> None:
    image = np.random.default_rng(0).integers(0, 256, (3, 9, 4)).astype("u1")
    np.testing.assert_array_equal(to_pixels("x", image), image)


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "P", "LA", "CMYK", "I;16", "F"])
def test_images_of_pil_look_as_they_do(mode: str) -> None:
    colors = np.random.default_rng(0).integers(0, 256, (6, 5, 3)).astype("u1")
    image = Image.fromarray(colors).convert("L" if mode == "I;16" else mode)
    image = image.convert("I").convert("I;16") if mode == "I;16" else image
    actual = Image.open(io.BytesIO(to_png(to_pixels("x", image)))).convert("RGBA")
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(image.convert("RGBA")))


@pytest.mark.parametrize("window", [True, False])
def test_a_figure_of_matplotlib_is_drawn_and_stays_open(window: bool) -> None:
    figure_of = pyplot.figure if window else Figure
    figure = figure_of(figsize=(2, 1), dpi=50)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.imshow(np.broadcast_to([1.0, 0.5, 0.0], (2, 2, 3)), aspect="auto")
    canvas = figure.canvas
    pixels = to_pixels("x", figure)
    assert pixels.shape == (50, 100, 4)
    assert np.abs(pixels[25, 50].astype(int) - [255, 128, 0, 255]).max() <= 1
    assert figure.canvas is canvas
    if window:
        assert pyplot.fignum_exists(figure.number)
        pyplot.close(figure)
    log_state = Logged(ALONE)
    with recording(log_state):
        log_image("drawn", figure)
    np.testing.assert_array_equal(log_state.images["drawn"], pixels)


WRONG = {
    "a batch": (np.zeros((2, 8, 8, 3)), "not [2, 8, 8, 3]: take one of the batch"),
    "two channels": (np.zeros((2, 8, 8)), "not [2, 8, 8]"),
    "no image": (object(), "not an object of another kind"),
    "empty": (np.zeros((0, 8)), "not [0, 8]"),
    "large": (np.zeros((1, 2049)), "2049 × 1 pixels are more than 2048"),
    "whole numbers": (np.zeros((4, 4), dtype=np.int64), "not int64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_image_is_refused(case: str) -> None:
    value, message = WRONG[case]
    with pytest.raises(ValueError, match=r"log_image\('x'\)") as caught:
        to_pixels("x", value)
    assert message in str(caught.value)


def test_tables_are_bounded() -> None:
    rows = [{"a": n, "b": "x" * 1000, "c": np.float32(n)} for n in range(500)]
    table = to_table("t", rows)
    assert table.columns == ("a", "b", "c")
    assert len(table.rows) == 200
    assert table.rows[7][0] == 7
    assert len(str(table.rows[7][1])) == 500
    assert table.rows[7][2] == 7.0
    assert to_table("t", [(1, None)], ["x", "y"]).rows == ((1, None),)
    for wrong in ({"a": 1}, [(1,)], "rows"):
        with pytest.raises(ValueError, match="log_table"):
            to_table("t", wrong)
    with pytest.raises(ValueError, match="2 columns"):
        to_table("t", [(1,)], ["x", "y"])


@pytest.mark.parametrize("name", ["val/loss", "test/x", "grad_norm/blocks.0"])
def test_names_of_what_is_measured_are_refused_in_training(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be logged in training"):
        Logged(ALONE, of_training=True).number(name, 1.0)
    Logged(ALONE).number(name, 1.0)


@pytest.mark.parametrize("name", ["", "loss", "1st", "a b", "x" * 101, "a\nb", "<b>"])
def test_names_that_could_be_mistaken_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be logged"), recording(Logged(ALONE)):
        log(name, 1.0)


def test_numbers_are_reduced_as_asked() -> None:
    log_state = Logged(ALONE)
    with recording(log_state):
        with weighted(3):
            log("mean", 1.0)
        with weighted(1):
            log("mean", torch.tensor(5.0))
        with weighted(0):
            log("mean", math.nan)
        log("each", torch.tensor([1.0, 2.0, 6.0]))
        log("top", torch.tensor([1, 7, 3]), reduce="max")
        log("low", -2, reduce="min")
        log("low", math.nan, reduce="min")
        log("last", torch.tensor([1.0, 2.0]), reduce="last")
        log("vast", torch.tensor([1e308, 1e308], dtype=torch.float64), reduce="sum")
        log("vast", 1e308, reduce="sum")
        log("even", 1e308)
        log("even", 1e308)
        with pytest.raises(ValueError, match="the same in each call"):
            log("top", 1, reduce="min")
    log("elsewhere", 1.0)
    numbers = log_state.numbers()
    assert math.isnan(numbers.pop("low"))
    assert numbers == {"mean": 2.0, "each": 3.0, "top": 7.0, "last": 2.0} | {
        "vast": math.inf,
        "even": 1e308,
    }
    restored_state = Logged(ALONE)
    restored_state.restore([json.loads(json.dumps(log_state.state()))])
    assert {n: v for n, v in restored_state.numbers().items() if n != "low"} == numbers


def test_the_last_value_is_that_of_rank_0_after_a_change_of_ranks() -> None:
    states = []
    for value in (1.0, 99.0):
        log_state = Logged(ALONE)
        with recording(log_state):
            log("last", value, reduce="last")
        states.append(json.loads(json.dumps(log_state.state())))
    restored_state = Logged(ALONE)
    restored_state.restore(states)
    assert restored_state.numbers() == {"last": 1.0}


def test_a_record_cannot_name_other_files(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    outside = tmp_path / "secret.png"
    outside.write_bytes(to_png(np.zeros((1, 1, 1), dtype=np.uint8)))
    name = f"media/train-1-{'0' * 16}.png"
    for path in ("secret.png", "media/../secret.png", str(outside), f"{name}\n", "media/x.png"):
        assert read_image(tmp_path, path) is None
    (tmp_path / name).symlink_to(outside)
    assert read_image(tmp_path, name) is None
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(b"<svg/>")
    assert read_image(tmp_path, name) is None
    (tmp_path / name).write_bytes(outside.read_bytes())
    assert read_image(tmp_path, name) == outside.read_bytes()
