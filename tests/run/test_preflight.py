"""Everything that can be wrong is said at once, by name, before anything is made."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import science

from instar.config.errors import ConfigError
from instar.config.load import Loaded, load_config
from instar.data.text.origin import parameters
from instar.run.start.preflight import check_memory, preflight

Config = Callable[..., Loaded]


def refusal_of(loaded_config: Loaded, ranks: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(loaded_config, ranks)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_what_is_left_out_is_derived_once(config: Config) -> None:
    prepared_run = preflight(config(), 1)
    assert prepared_run.config.model.n_mlp == 128
    assert prepared_run.config.learning_rate.lr_decay_iters == 8
    assert prepared_run.config.model.vocab_size == prepared_run.spec.dataset.vocab_size
    assert set(prepared_run.derived_values) == {
        "model.n_kv_head",
        "model.n_mlp",
        "model.vocab_size",
        "learning_rate.lr_decay_iters",
        "eval.batch_size",
        "data.seed",
        "eval.at_start",
    }


def test_memory_is_forecast_for_the_ranks_devices(config: Config) -> None:
    loaded_config = config("model.dropout=0.0", "device=auto")
    on_gpu = preflight(loaded_config, 1, device="cuda")
    on_named_gpu = preflight(config("model.dropout=0.0", "device=cuda"), 1)
    assert on_gpu.forecast.stages[0].memory == on_named_gpu.forecast.stages[0].memory
    assert on_gpu.forecast.stages[0].memory != preflight(loaded_config, 1).forecast.stages[0].memory
    assert on_gpu.config.device == "auto"


def test_seeds_share_tokenizer_and_held_out_text_where_the_data_have_a_seed(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number in range(40):
        Path(f"texts/{number}.txt").write_text(
            f"{number} {number**2} {chr(97 + number % 26)} " * 30
        )
    data_settings = (
        "data.source=texts",
        "data.path=null",
        "data.tokenizer=bpe",
        "data.vocab_size=300",
    )
    by_seed = {}
    for seed, of_data in ((1, 7), (2, 7), (2, None), (3, None)):
        more = () if of_data is None else (f"data.seed={of_data}",)
        prepared_run = preflight(config(f"seed={seed}", *data_settings, *more), 1)
        assert prepared_run.config.data.seed == (seed if of_data is None else of_data)
        assert ("data.seed" in prepared_run.derived_values) == (of_data is None)
        task = prepared_run.spec.task(prepared_run.config)
        order = task.train_samples()[1].indices(0, 0, 20).tolist()
        by_seed[seed, of_data] = prepared_run.config.data.path, task.spec.fingerprints, order
    first, second = by_seed[1, 7], by_seed[2, 7]
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert by_seed[2, None][0] != by_seed[3, None][0]
    assert by_seed[2, None][1]["tokenizer"] != by_seed[3, None][1]["tokenizer"]


def test_samples_are_divided_by_the_seed_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    science.place(tmp_path)
    monkeypatch.chdir(tmp_path)
    ways = (["seed=1"], ["seed=2"], ["seed=1", "data.seed=7"], ["seed=2", "data.seed=7"])
    prints = [
        preflight(load_config("run.yaml", way), 1).spec.data.fingerprint  # type: ignore[attr-defined]
        for way in ways
    ]
    assert prints[0] != prints[1]
    assert prints[2] == prints[3]


def test_a_run_shorter_than_its_warm_up_still_has_a_course(config: Config) -> None:
    prepared_run = preflight(config("learning_rate.warmup_iters=50"), 1)
    assert prepared_run.config.learning_rate.lr_decay_iters == 51


def test_a_corpus_shorter_than_a_context(config: Config) -> None:
    assert "fewer than the 100,001 that a context of 100,000 needs" in refusal_of(
        config("model.context=100000")
    )


def test_a_vocabulary_that_does_not_fit_the_shards(config: Config) -> None:
    message = refusal_of(config("model.vocab_size=5"))
    assert "5 rows are too few for a tokenizer of" in message
    assert "--set model.vocab_size=5" in message


def test_more_ranks_than_samples(config: Config) -> None:
    message = refusal_of(config("train.batch_size=100000", "model.context=4000"), ranks=64)
    assert "64 ranks, but only" in message


def test_a_global_batch_with_fewer_samples_than_ranks(config: Config) -> None:
    message = refusal_of(
        config("train.batch_size=1", "train.gradient_accumulation_steps=2"), ranks=4
    )
    assert "a global batch of 2 samples leaves some of 4 ranks without any" in message


def test_a_run_directory_that_is_a_file(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file, not a folder" in refusal_of(config(f"record.out_dir={tmp_path / 'file'}"))


def test_the_run_directory_of_another_run(config: Config, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text("name: other\n")
    assert "holds another run" in refusal_of(config(f"record.run_dir={tmp_path / 'run'}"))


def test_all_of_them_at_once(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refusal_of(config("model.vocab_size=5", f"record.out_dir={tmp_path / 'file'}"))
    assert "is a file" in message
    assert "too few" in message
    assert message.splitlines()[-1].startswith("2 errors. Nothing was started.")


def test_a_truncated_shard(config: Config, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus / "tokens", tmp_path / "tokens")
    shard = tmp_path / "tokens" / "train-00000.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    loaded_config = load_config(None, _settings_at(config(), tmp_path / "tokens"))
    message = refusal_of(loaded_config)
    assert "train-00000.safetensors" in message
    assert f"{len(content) - 7:,}" in message or str(len(content) - 7) in message


def test_a_foreign_shard(config: Config, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus / "tokens", tmp_path / "tokens")
    (tmp_path / "tokens" / "val-00000.safetensors").write_bytes(b"GGUF" + bytes(100))
    assert "val-00000.safetensors" in refusal_of(
        load_config(None, _settings_at(config(), tmp_path / "tokens"))
    )


def _settings_at(loaded_config: Loaded, path: Path) -> list[str]:
    data = parameters(loaded_config.config.data, 0)
    keys = ("source", "tokenizer", "val_fraction", "test_fraction", "text_field")
    return [*(f"data.{key}={data[key]}" for key in keys), f"data.path={path}"]


@pytest.fixture
def stream(config: Config, corpus: Path, tmp_path: Path) -> Config:
    """The config of an iterable whose length nobody knows."""

    def load(*overrides: str) -> Loaded:
        data = ("kind=python", "source=feeds:texts", f"val_source={corpus / 'squares.txt'}")
        settings = (*data, "tokenizer=byte", f"path={tmp_path / 'stream'}")
        return config(*(f"data.{setting}" for setting in settings), *overrides)

    return load


def test_a_course_over_epochs_of_unknown_length(stream: Config) -> None:
    message = refusal_of(stream("train.until=[3ep]"))
    assert "learning_rate.lr_decay_iters is needed" in message
    assert "the number of samples of this source is unknown" in message
    assert preflight(stream("train.until=[3ep]", "learning_rate.lr_decay_iters=20"), 1)
    assert preflight(stream("train.until=[20it]"), 1)


def test_epochs_of_unknown_length_while_the_context_changes(stream: Config) -> None:
    change = 'schedule=[{"name": "set_context", "value": 4, "max_wait_iters": 5}]'
    settings = "learning_rate.lr_decay_iters=20", change
    message = refusal_of(stream("train.until=[3ep]", *settings))
    assert "set_context restarts the stream" in message
    # samples keep their length until set_context
    longer = 'schedule=[{"name": "extend_context", "value": 512, "max_wait_iters": 5}]'
    assert preflight(stream("train.until=[3ep]", "learning_rate.lr_decay_iters=20", longer), 1)
    assert preflight(stream("train.until=[20it]", *settings), 1)


@pytest.mark.parametrize(
    ("device", "gpu_bytes", "change", "message"),
    [
        ("cpu", None, "model.n_embd=1048576", "for its weights, and the machine has"),
        ("auto", None, "model.n_embd=1048576", "for its weights, and the machine has"),
        ("cuda", 1 << 16, "model.n_embd=64", "for weights, gradients and optimizer, and the GPU"),
        ("cuda", 1 << 30, "train.batch_size=1000000", "in a step"),
        ("cpu", None, "train.batch_size=1048576", "in a step"),
    ],
)
def test_what_the_machine_cannot_hold_is_refused_before_anything_is_built(
    config: Config, device: str, gpu_bytes: int | None, change: str, message: str
) -> None:
    more = "train.gradient_accumulation_steps=1"
    larger = ["model.context=128", "model.n_layer=100"] if "batch" in change else []
    loaded_config = config(change, more, *larger)
    prepared_run = preflight(loaded_config, 1)
    with pytest.raises(ConfigError) as caught:
        check_memory(loaded_config, prepared_run.forecast, device, gpu_bytes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("device", "host_bytes", "message"),
    [
        ("cpu", 1 << 40, "needs GPUs, and there is none"),
        (
            "cuda",
            1 << 17,
            "for weights, gradients and optimizer, which are offloaded, and the machine",
        ),
    ],
)
def test_what_a_host_cannot_hold_for_its_gpus_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch, device: str, host_bytes: int, message: str
) -> None:
    keys = ("parallel.strategy=fsdp", "parallel.fsdp.offload=true", "optimizer.name=adamw")
    loaded_config, of_host = config(*keys), "instar.run.start.preflight.host_bytes"
    forecast = preflight(loaded_config, 2).forecast
    monkeypatch.setattr(of_host, lambda: host_bytes)
    with pytest.raises(ConfigError, match=message):
        check_memory(loaded_config, forecast, device, 1 << 30, 2)
    monkeypatch.setattr(of_host, lambda: 1 << 40)
    of_gpu = (
        forecast.stages[0].memory["fsdp"].kept_bytes - 1
    )  # what is offloaded need not fit there
    check_memory(loaded_config, forecast, "cuda", of_gpu, 2)


def test_what_fits_is_let_through(config: Config) -> None:
    loaded_config = config()
    prepared_run = preflight(loaded_config, 1)
    for device, size in (("cpu", None), ("auto", None), ("cuda", 1 << 30)):
        check_memory(loaded_config, prepared_run.forecast, device, size)
