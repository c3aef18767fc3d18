"""A chain of states: every one comes back bit for bit, and every damage is found and named."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from chains import after, first, same, save
from safetensors.torch import load_file

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.chain import (
    append,
    check_out_state,
    find_link,
    links,
    load_state,
    verify_chain,
)
from instar.extensions.delta.format import folder as folders
from instar.extensions.delta.format.folder import INDEX


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return tmp_path / "deltas"


def test_every_state_comes_back_bit_for_bit(chain: Path, tmp_path: Path) -> None:
    states = save(chain, 8)

    assert [(link.number, link.step, link.kind) for link in links(chain)] == [
        (number, 10 * number, "anchor" if number in (0, 5) else "delta") for number in range(8)
    ]
    for number, state in enumerate(states):
        assert same(load_state(chain, number), state)
    check_out_state(chain, 7, tmp_path / "out.safetensors")
    assert same(load_file(tmp_path / "out.safetensors"), states[7])
    assert verify_chain(chain) == links(chain)
    assert find_link(links(chain), step=30).number == 3


def test_growth_starts_a_new_anchor(chain: Path) -> None:
    save(chain, 2)
    larger_state = load_state(chain) | {
        "embedding": torch.zeros(64, 32),
        "layer.1.weight": torch.ones(3),
    }
    assert append(chain, 20, larger_state, load_state(chain)).kind == "anchor"
    assert append(chain, 30, larger_state, larger_state).kind == "delta"
    assert same(load_state(chain, 3), larger_state)
    verify_chain(chain)


def test_numbers_go_on_without_a_base(chain: Path) -> None:
    states = save(chain, 3)
    link = append(chain, 10, states[1], None)
    assert (link.number, link.kind) == (3, "anchor")
    assert find_link(links(chain), step=10).number == 3
    verify_chain(chain)


def test_an_unchanged_state_is_a_link_of_a_few_hundred_bytes(chain: Path) -> None:
    state = first()
    append(chain, 0, state, None)
    assert append(chain, 1, state, state).size_bytes < 500
    assert same(load_state(chain), state)


def test_tied_tensors_are_saved_once_under_the_first_name(chain: Path, tmp_path: Path) -> None:
    tied = torch.ones(4, 2)
    state = {"wte.weight": tied, "lm_head.weight": tied, "bias": torch.zeros(2)}
    append(chain, 0, state, None)
    link = append(chain, 1, state, {name: tensor.clone() for name, tensor in state.items()})
    assert link.kind == "delta"
    assert link.aliases == {"lm_head.weight": "wte.weight"}
    check_out_state(chain, 1, tmp_path / "out")
    assert load_file(tmp_path / "out").keys() == {"wte.weight", "bias"}
    assert load_state(chain)["lm_head.weight"] is not None
    assert same(load_state(chain), state)


def test_tensors_may_be_views(chain: Path) -> None:
    state = {"a": torch.arange(12.0).view(3, 4).T, "b": torch.arange(12.0)[::3]}
    append(chain, 0, state, None)
    assert same(load_state(chain), {name: tensor.contiguous() for name, tensor in state.items()})


def test_a_base_that_is_not_the_last_state_is_refused(chain: Path) -> None:
    states = save(chain, 3)
    before = {path.name for path in chain.iterdir()}
    with pytest.raises(CheckpointError, match=r"not the state of link-2\.delta"):
        append(chain, 3, after(states[2], 3), states[1])
    assert {path.name for path in chain.iterdir()} == before
    append(chain, 3, after(states[2], 3), states[2])
    verify_chain(chain)


def test_another_writer_is_excluded(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = first()
    append(chain, 0, state, None)
    monkeypatch.setattr(folders, "LOCK_LIMIT_S", 0)
    with folders.lock_chain(chain), pytest.raises(CheckpointError, match="another process"):
        append(chain, 1, state, state)


def test_another_writer_is_waited_for(chain: Path) -> None:
    state = first()
    append(chain, 0, state, None)
    with ThreadPoolExecutor(1) as threads:
        with folders.lock_chain(chain):
            future = threads.submit(append, chain, 1, state, state)
            assert [link.number for link in links(chain)] == [0]
        assert future.result().number == 1


@pytest.mark.parametrize("failing", ["rename", "sync_folder", "write_synced"])
def test_what_fails_leaves_the_chain_as_it_was(
    chain: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Each call of a save fails once, as on a full disk."""
    states = save(chain, 2)
    new = after(states[1], 2)
    real = getattr(folders.atomic, failing)
    for fatal in itertools.count():
        calls = itertools.count()

        def fails(*args: object, fatal: int = fatal, calls: itertools.count[int] = calls) -> None:
            if next(calls) == fatal:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(folders.atomic, failing, fails)
            try:
                append(chain, 20, new, states[1])
            except CheckpointError as error:
                assert "No space left" in str(error)  # noqa: PT017
                assert not list(chain.glob(".*"))
            else:
                assert fatal
                break
        verify_chain(chain)
        assert same(load_state(chain), states[1])
    assert same(load_state(chain), new)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link is missing": (lambda at: (at / "link-3.delta").unlink(), "number 3 is missing"),
    "the last is missing": (lambda at: (at / "link-7.delta").unlink(), "number 7 is missing"),
    "the first is missing": (
        lambda at: (at / "anchor-0.safetensors").unlink(),
        "number 0 is missing",
    ),
    "an anchor is missing": (
        lambda at: (at / "anchor-5.safetensors").unlink(),
        "number 5 is missing",
    ),
    "two are swapped": (lambda at: swap(at / "link-2.delta", at / "link-3.delta"), "link-2"),
    "one is renamed": (lambda at: (at / "link-7.delta").rename(at / "link-8.delta"), "link-8"),
    "one is another's": (
        lambda at: swap(at / "link-3.delta", other(at) / "link-3.delta"),
        "link-3",
    ),
    "the last is another's": (
        lambda at: swap(at / "link-7.delta", other(at) / "link-7.delta"),
        "link-7",
    ),
    "an anchor is another's": (
        lambda at: swap(at / "anchor-5.safetensors", other(at) / "anchor-5.safetensors"),
        "anchor-5",
    ),
    "the index is missing": (lambda at: (at / INDEX).unlink(), INDEX),
}


def swap(left: Path, right: Path) -> None:
    spare = left.with_name("aside")
    left.rename(spare)
    right.rename(left)
    spare.rename(right)


def other(at: Path) -> Path:
    """A chain of the same tensors with other values."""
    folder = at.with_name("other")
    state = {name: tensor.clone() for name, tensor in first().items()}
    state["scale"] += 1
    append(folder, 0, state, None)
    for step in range(1, 8):
        before, state = state, after(state, step)
        append(folder, 10 * step, state, before, anchor=step == 5)
    return folder


@pytest.mark.parametrize(("damage", "pattern"), DAMAGES.values(), ids=DAMAGES)
def test_every_damage_to_the_chain_is_named(
    chain: Path, damage: Callable[[Path], object], pattern: str
) -> None:
    save(chain, 8)
    damage(chain)
    with pytest.raises(CheckpointError, match=pattern):
        verify_chain(chain)


@pytest.mark.parametrize("name", ["anchor-0.safetensors", "link-1.delta", "link-2.delta", INDEX])
def test_any_flipped_byte_is_found_and_its_file_named(chain: Path, name: str) -> None:
    save(chain, 3)
    content = (chain / name).read_bytes()
    for at in range(0, len(content), max(1, len(content) // 60)):
        corrupt_content = bytearray(content)
        corrupt_content[at] ^= 1 << at % 8
        (chain / name).write_bytes(corrupt_content)
        with pytest.raises(CheckpointError, match=name):
            verify_chain(chain)
    (chain / name).write_bytes(content)
    verify_chain(chain)


def test_a_chain_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no chain"):
        links(tmp_path)
    with pytest.raises(CheckpointError, match="there is no chain"):
        load_state(tmp_path / "missing")


def test_a_state_that_is_not_there_is_refused(chain: Path) -> None:
    save(chain, 2)
    with pytest.raises(
        CheckpointError, match="number 9 is not in the chain, which has numbers 0 to 1"
    ):
        load_state(chain, 9)


def test_weights_that_become_tied_or_separate_begin_a_new_anchor(tmp_path: Path) -> None:
    table, head = torch.ones(3, 2), torch.zeros(3, 2)
    separate, tied = {"table": table, "head": head}, {"table": table, "head": table}
    before = None
    for step, state in enumerate([separate, tied, tied, separate]):
        append(tmp_path / "chain", step, state, before)
        before = state
    assert [link.kind for link in links(tmp_path / "chain")] == [
        "anchor",
        "anchor",
        "delta",
        "anchor",
    ]
    verify_chain(tmp_path / "chain")
    for number, state in enumerate([separate, tied, tied, separate]):
        actual = load_state(tmp_path / "chain", number)
        assert all(torch.equal(actual[name], state[name]) for name in state)
