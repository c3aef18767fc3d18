import random

import numpy as np
import torch

from instar.run.state.generators import generator_states, restore_generators, seed_generators

CPU = torch.device("cpu")


def draws() -> list[float]:
    """Some of everything, an odd number of normal variates, of which generators hold one back."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.randn(()).item(),
    ]


def test_generators_go_on_from_where_their_states_were_taken() -> None:
    draws()
    states = generator_states(CPU)
    expected = [draws(), draws()]
    seed_generators(0, 0, 0, CPU)
    restore_generators(states, CPU)
    assert [draws(), draws()] == expected


def test_torch_draws_what_it_draws_after_its_own_seeding() -> None:
    seed = np.random.SeedSequence((3, 2, 1)).generate_state(3, np.uint64)[0] >> np.uint64(1)
    torch.manual_seed(int(seed))
    expected = torch.randn(5).tolist()
    seed_generators(3, 2, 1, CPU)
    assert torch.randn(5).tolist() == expected


def test_each_place_in_a_run_and_each_rank_draws_its_own() -> None:
    def at(*place: int) -> tuple[float, ...]:
        seed_generators(*place, CPU)
        return tuple(draws())

    places = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]
    assert len({at(*place) for place in places}) == len(places)
    assert at(1, 0, 0) == at(1, 0, 0)
