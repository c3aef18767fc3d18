"""Chains of deltas: killed, damaged, without room, a thousand links long, and larger than 2³¹."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import chains
import figures
import numpy as np
import pytest
import torch
from forks import Forks
from shapes import llama

from instar.checkpoint.layout import TensorEntry, encode_header
from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.chain import append, links, load_state, to_bits, verify_chain
from instar.extensions.delta.format.state import state_hash
from instar.extensions.delta.replay import apply_file, create_file, remove_states
from instar.models.gpt import GPT

KILLS = figures.times(5, 200)
LINKS = figures.times(20, 1000)
FLIPS = figures.times(100, 5_000)
FULL_DISKS = figures.times(3, 100)
LARGE = figures.times(1 << 22, (1 << 31) + (1 << 20))


@pytest.mark.timeout(3600)
def test_a_chain_whose_writer_is_killed_is_whole_to_its_last_acknowledged_state(
    forks: Forks, tmp_path: Path
) -> None:
    chain, log_path = tmp_path / "deltas", tmp_path / "acknowledged"
    start_s = time.perf_counter()
    append(chain, 0, chains.weights(0), None)
    save_s = time.perf_counter() - start_s
    log_path.write_text("0\n")
    chance = random.Random(0)
    losses, broken, gaps = list[str](), list[str](), list[str]()
    for _ in range(KILLS):
        before = links(chain)[-1]
        saver = forks.start("chains:save_for_ever", str(chain), str(log_path), place=tmp_path)
        target_step = before.step + chance.choice((1, 1, 2, 4))
        saver.wait_until(lambda target_step=target_step: acknowledged_step(log_path) >= target_step)
        assert not saver.ended_within(chance.uniform(0, 2 * save_s)), saver.output()
        saver.signal(signal.SIGKILL)
        assert saver.finish() == -signal.SIGKILL
        try:
            intact_links = verify_chain(chain)
        except CheckpointError as error:
            broken.append(str(error))
            break
        last = intact_links[-1]
        if last.step < acknowledged_step(log_path):
            losses.append(f"{last} is before {acknowledged_step(log_path)}")
        if not chains.same(load_state(chain), chains.weights(last.step)):
            broken.append(f"{last} does not hold what was saved")
        if last.number - before.number != last.step - before.step:
            gaps.append(f"{before} to {last}")
        remove_states(chain, last.number)
    figures.write(
        "delta-killed",
        [
            figures.none_of(
                KILLS, "SIGKILL while deltas are saved: acknowledged states lost", losses
            ),
            figures.none_of(KILLS, "SIGKILL while deltas are saved: chain not whole", broken),
            figures.none_of(KILLS, "resume of a chain: numbers do not go on", gaps),
        ],
    )


def acknowledged_step(log_path: Path) -> int:
    return int(log_path.read_text().split("\n")[-2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_state_of_a_training_is_rebuilt_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """All hashes are compared with those of the weights as they were, some states as a whole."""
    states, before = [], None
    for step, state in enumerate(train_states(LINKS, dtype)):
        append(tmp_path, step, state, before)
        before = state
        states.append({name: tensor.clone() for name, tensor in state.items()})
    chain = verify_chain(tmp_path)
    wrong = [
        link.number
        for link, state in zip(chain, states, strict=True)
        if link.result_hash != state_hash({name: to_bits(value) for name, value in state.items()})
    ]
    wrong += [
        number
        for number in range(0, LINKS + 1, max(1, LINKS // 20))
        if not chains.same(load_state(tmp_path, number), states[number])
    ]
    word = str(dtype).removeprefix("torch.")
    figures.write(
        f"delta-links-{word}",
        [figures.none_of(LINKS, f"link of a training in {word}: state differs in a bit", wrong)],
    )


def train_states(steps: int, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yields copies of a small model's weights before the first step and after each."""
    torch.manual_seed(0)
    model = GPT(llama(64))
    model.init_weights(0)
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for step in range(steps + 1):
        if step:
            tokens = torch.randint(64, (2, 17))
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield {name: value.detach().clone() for name, value in model.named_parameters()}


def test_every_flipped_bit_is_found_and_its_file_named(tmp_path: Path) -> None:
    chains.save(tmp_path, 4)
    files = sorted(path for path in tmp_path.iterdir())
    chance = random.Random(0)
    not_found, not_named = [], []
    for _ in range(FLIPS):
        path = chance.choice(files)
        content = path.read_bytes()
        damage = bytearray(content)
        at = chance.randrange(len(damage))
        damage[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damage)
        try:
            verify_chain(tmp_path)
        except CheckpointError as error:
            if path.name not in str(error):
                not_named.append(f"{path.name} at {at}: {error}")
        else:
            not_found.append(f"{path.name} at {at}")
        path.write_bytes(content)
    figures.write(
        "delta-flips",
        [
            figures.none_of(FLIPS, "flipped bit in a chain: not found", not_found),
            figures.none_of(FLIPS, "flipped bit in a chain: its file not named", not_named),
        ],
    )


def test_a_full_disk_costs_no_state(forks: Forks, tmp_path: Path) -> None:
    chain = tmp_path / "deltas"
    append(chain, 0, chains.weights(0), None)
    link_bytes = append(chain, 1, chains.weights(1), chains.weights(0)).size_bytes
    chance = random.Random(0)
    wrong = []
    for _ in range(FULL_DISKS):
        room = chance.randrange(link_bytes)
        before = links(chain)[-1].step
        child = forks.start("chains:save_with_too_little_room", str(chain), room, place=tmp_path)
        assert child.finish() == 0, child.output()
        facts = json.loads(child.output().splitlines()[-1])
        is_clear = "too large" in facts["told"] and str(chain) in facts["told"]
        if not is_clear or facts["last"] != before or facts["then"] != before + 1:
            wrong.append(f"{room} bytes of room: {facts}")
    what = "disk full while a delta is saved: no clear error, a state lost, or no next save"
    figures.write("delta-full-disk", [figures.none_of(FULL_DISKS, what, wrong)])


def test_a_tensor_may_have_more_than_two_to_the_31_elements(tmp_path: Path) -> None:
    """The files are sparse; only what is rebuilt takes room on the disk."""
    places = [0, LARGE // 2, min(LARGE, 1 << 31) - 1, LARGE - 2, LARGE - 1]
    old, new, link, out = (tmp_path / name for name in ("old", "new", "link", "out"))
    for path, positions in ((old, []), (new, places)):
        entry = TensorEntry("U8", (2, LARGE // 2), LARGE)
        header = encode_header({"weight": entry})
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + LARGE)
            for place in positions:
                file.seek(len(header) + place)
                file.write(b"\1")
    footer = create_file(old, new, link)
    assert footer.n_changed == len(set(places))
    assert link.stat().st_size < 10_000
    apply_file(old, link, out)
    content = np.memmap(out, np.uint8, "r")[-LARGE:]
    assert [bool(content[place]) for place in places] == [True] * len(places)
    out.unlink()
    figures.write("delta-large", [figures.count("elements of the largest tensor", LARGE)])
