"""One micro-batch of a user's task is run before anything of a run is created, and leaves no trace."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import science
import torch
from cases import parametrize_first
from tiny_run import Place, codes, events, output_of, weights

from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.data import user_source
from instar.distributed.world import World
from instar.run.start.preflight import preflight
from instar.run.start.smoke_test_step import run_trial

Try = Callable[..., list[str]]

GROWTH = [{"name": "widen", "value": {"axis": "hidden", "size": 32}, "when": {"at_step": 9}}]


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """The warnings of a trial of `mistaken:<task>`; raises what preflight and it raise."""
    science.place(tmp_path)
    monkeypatch.chdir(tmp_path)

    def try_task(task: str, *overrides: str, ranks: int = 1) -> list[str]:
        loaded_config = load_config("run.yaml", [f"task={task}", "precision=fp32", *overrides])
        prepared_run = preflight(loaded_config, ranks)
        return run_trial(prepared_run, World(0, 0, ranks, torch.device("cpu"), "gloo"))

    return try_task


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return science.place(tmp_path)


REFUSED = {
    "Streamed": "an iterable of more than 100 samples is not read into memory; to read it as a stream",
    "OtherwiseHeldOut": "val has x as int64[*], not float32[*] as in train",
    "Unseeded": "item 0 is not what it was when the iterable was read before; it must give the same",
    "TooLong": "IndexError: index 80 is out of bounds for dimension 0 with size 80; when item 80 of 81",
    "Collating": "a DataLoader with a collate_fn, which would not be called; return its data set",
    "Nothing": "samples(): None; return arrays by name",
    "NoSamples": "samples(): there are no samples",
    "Words": "side has values of type <U5, not numbers; encode text as numbers first",
    "WordsInRows": "sample 0: side is 'left', which is no array of numbers",
    "Unnamed": "tuples of 3 parts without names; name them in the task's class, e.g. fields =",
    "Alone": "samples(): a single Tensor without a name; return arrays by name",
    "Sparse": "x is a sparse or quantized tensor; give x.to_dense()",
    "SparseMatrix": "x is a csr_matrix, where an array [samples, …] is expected; give x.toarray()",
    "Meant": "number is a int, where an array [samples, …] is expected",
    "OtherKeys": "sample 1 has y, the first one x",
    "Failing": "samples() failed: FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.npy'",
    "Leaving": "samples() failed: sys.exit() was called",
    "Drawn": "x differs when the same samples are read again; random augmentation belongs in "
    "data.transform",
    "Negative": "the first 8 samples weigh -8, which is not a positive number",
    "HasNaN": "the loss of the first micro-batch is nan: x holds values that are not finite",
    "Double": "the model is not in float64: return x.astype('float32') from samples()",
    "Lazy": "0.weight has no size yet; give lazy modules their sizes, as in nn.Linear(in, out)",
    "SparseRows": "weight has sparse gradients, which cannot be clipped or added up; make its module "
    "with sparse=False",
    "Cached": "two calls returned the same parameter up.weight; module() must make a new model",
    "Backbone": "two calls returned the same parameter 0.weight; module() must make a new model",
    "NoModule": "module() must return a torch.nn.Module, not a OrderedDict of up.weight, up.bias",
    "NoParameters": "the module has no parameters to train",
    "Frozen": "no parameter of the model requires a gradient, so nothing would train",
    "NoField": "up has an axis 'hiden', which is not a whole-number field of the shape; there are hidden",
    "NoShape": "shape() must return a Shape, not a dict of hidden",
    "NoLoss": "NoLoss.loss must be a tensor [samples], one value for each of 8, not None: it returns",
    "WideLoss": "must be [samples], one for each of 8, not [8, 2]: take the mean over the other axes",
    "DictLoss": "DictLoss.loss must be a tensor [samples], one value for each of 8, not a dict of loss",
    "MeanLoss": "MeanLoss.loss must be [samples], one for each of 8, not []: say reduction='none'",
    "NumberLoss": "NumberLoss.loss must be a tensor [samples], one value for each of 8, not a float",
    "Detached": "the loss does not depend on the model's parameters: remove detach(), item()",
    "Infinite": "the loss of the first micro-batch is inf",
    "NoColumn": "loss failed: KeyError: 'label' (",
    "ListMeasure": "ListMeasure.measure must return tensors by name, not a list",
    "NumberMeasure": "NumberMeasure.measure's accuracy must be a tensor [samples], one value for each",
    "TensorPredict": "TensorPredict.predict must return tensors by name, not a tensor [4, 2] of float32",
}


@pytest.mark.parametrize("task", REFUSED)
def test_a_mistake_in_a_task_is_named_before_the_run(
    attempt: Try, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_source, "MOST_ITEMS", 100)
    with pytest.raises(ConfigError) as caught:
        attempt(f"mistaken:{task}")
    message = str(caught.value)
    assert REFUSED[task] in message
    assert f"mistaken:{task}" in message or f"{task}." in message
    assert "Nothing was started." in message


def test_the_line_of_the_users_code_is_named(attempt: Try) -> None:
    with pytest.raises(
        ConfigError, match=r"mistaken\.py:\d+ in loss\); the batch has x float32\[8, 2\]"
    ):
        attempt("mistaken:NoColumn")
    with pytest.raises(ConfigError, match=r"mistaken\.py:\d+ in samples"):
        attempt("mistaken:Leaving")


def test_another_mistake_of_samples_in_float64_has_no_hint_about_their_type(attempt: Try) -> None:
    with pytest.raises(ConfigError, match="KeyError: 'label'") as caught:
        attempt("mistaken:DoubleWithoutColumn")
    assert "astype" not in str(caught.value)


@parametrize_first("task", ["Tensors", "Lists", "Rows", "Tupled", "Arrays", "Mapped"], first=1)
def test_samples_in_other_forms_are_the_same_samples(place: Place, attempt: Try, task: str) -> None:
    assert attempt(f"mistaken:{task}") == []
    stop = "train.until=[6it]"
    for name, of in (("plain", "science:Halves"), ("other", f"mistaken:{task}")):
        children = place.train(place.path / name, f"task={of}", stop)
        assert codes(children) == [0], output_of(children)
    assert weights(place.path / "other", 6) == weights(place.path / "plain", 6)


def test_another_batch_size_of_a_loader_is_a_warning(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.path)
    for size in (5, 8):
        overrides = ["task=mistaken:Batched", f"train.batch_size={size}", "test.at_end=false"]
        warnings = "".join(preflight(load_config("run.yaml", overrides), 1).warnings)
        assert ("not the batch_size 5 of the DataLoader" in warnings) == (size == 8)


@pytest.mark.parametrize("task", ["Graphs", "Uneven"])
def test_ragged_samples_are_trained_on(place: Place, task: str) -> None:
    rules = ("test.at_end=false", "early_stopping.rules=[]", "checkpoint.best_of=[loss]")
    settings = (f"task=mistaken:{task}", "train.until=[3it]", "data.val=9", "data.test=9", *rules)
    children = place.train(place.path / "run", *settings)
    assert codes(children) == [0], output_of(children)


def test_a_data_set_is_stratified_by_a_column_that_is_read(place: Place) -> None:
    children = place.train(
        place.path / "run", "task=mistaken:Mapped", "data.stratify=side", "train.until=[3it]"
    )
    assert codes(children) == [0], output_of(children)


def test_values_that_are_not_finite_anywhere_are_told(attempt: Try) -> None:
    (warning,) = attempt("mistaken:SomeNaN")
    assert "x holds values that are not finite in 1 of 80 samples, first in sample 70" in warning


def test_parameters_without_a_part_in_the_loss(attempt: Try) -> None:
    (warning,) = attempt("mistaken:Unused")
    assert "spare.weight, spare.bias took no part in the loss" in warning
    with pytest.raises(ConfigError, match="with 2 ranks DDP waits for every parameter's gradient"):
        attempt("mistaken:Unused", ranks=2)
    assert attempt("mistaken:Unused", "parallel.ddp.find_unused_parameters=true", ranks=2)


def test_a_loss_that_goes_around_the_model_that_ranks_train(attempt: Try) -> None:
    assert attempt("mistaken:Around") == attempt("mistaken:Around", "reproducible=elastic", ranks=2)
    fsdp = "parallel.strategy=fsdp"
    for keys in ((), (fsdp,), (fsdp, "reproducible=elastic")):
        with pytest.raises(ConfigError, match="calls parts of the model, but not the model itself"):
            attempt("mistaken:Around", *keys, ranks=2)


def test_what_growth_needs_is_tried_where_the_schedule_has_growth(attempt: Try) -> None:
    growth = f"schedule={json.dumps(GROWTH)}"
    assert attempt("mistaken:PairOut") == []
    with pytest.raises(ConfigError, match=r"PairOut.outputs must return one tensor .* not a tuple"):
        attempt("mistaken:PairOut", growth)
    assert attempt("mistaken:FixedSize") == []
    with pytest.raises(ConfigError, match=r"after growth.* up.weight is 32×2, and .* 24×2"):
        attempt("mistaken:FixedSize", growth)


def test_a_trial_leaves_random_generators_as_they_were(attempt: Try) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.random(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    attempt("science:Halves")
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


def test_one_rank_or_two_refuse_without_a_folder(place: Place) -> None:
    for ranks, task in ((1, "DictLoss"), (2, "Unused")):
        children = place.train(place.path / "run", f"task=mistaken:{task}", ranks=ranks)
        assert codes(children) == [2] * ranks, output_of(children)
        assert f"mistaken:{task}" in output_of(children)
        assert not (place.path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("task=mistaken:LeavesLater",),
            "LeavesLater.loss ended the process: sys.exit(0) was called",
        ),
        (("data.transform=mistaken:leave",), "reading samples ended the process: sys.exit(0) was"),
    ],
)
@parametrize_first("ranks", [2, 1], first=1)
def test_a_task_that_exits_has_failed(
    place: Place, settings: tuple[str, ...], message: str, ranks: int
) -> None:
    run_dir = place.path / "run"
    children = place.train(run_dir, *settings, ranks=ranks)
    assert set(codes(children)) == {4}, output_of(children)
    (failure,) = events(run_dir, "failed")
    assert message in failure["message"]
    assert "mistaken.py:" in failure["message"]
    assert failure["exit_code"] == 4
