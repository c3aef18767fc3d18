"""Graphs: a network of PyTorch Geometric predicts energies of molecules from atoms and bonds."""

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINEConv, global_add_pool

from instar.custom import CustomTask, Section


class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.atom, self.bond = nn.Linear(4, width), nn.Linear(3, width)
        self.first, self.second = (GINEConv(nn.Linear(width, width)) for _ in range(2))
        self.energy = nn.Linear(width, 1)

    def forward(self, data):
        x, bonds = self.atom(data.x), self.bond(data.edge_attr)
        for layer in (self.first, self.second):
            x = x + layer(x, data.edge_index, bonds).relu()
        return self.energy(global_add_pool(x, data.batch)).squeeze(1)


def molecule(generator):
    """A random tree of atoms of four kinds, with bonds of three kinds, and its energy."""
    n = int(torch.randint(3, 10, (), generator=generator))
    kinds = torch.randint(4, (n,), generator=generator)
    ends = torch.tensor(
        [[int(torch.randint(k, (), generator=generator)), k] for k in range(1, n)]
    ).T
    bonds = torch.randint(3, (n - 1,), generator=generator)
    energy = ((1 + bonds) * (1 + kinds[ends[0]]) * (1 + kinds[ends[1]])).sum() / 50
    return Data(
        x=nn.functional.one_hot(kinds, 4).float(),
        edge_index=torch.cat([ends, ends.flip(0)], dim=1),
        edge_attr=nn.functional.one_hot(bonds.repeat(2), 3).float(),
        y=energy[None],
    )


class Settings(Section):
    width: int = 16


class Energies(CustomTask):
    Model, better, unit = Settings, {"error": "min"}, "molecule"

    def samples(self):
        generator = torch.Generator().manual_seed(self.seed)
        return [molecule(generator) for _ in range(600)]

    def collate(self, samples):
        graphs = [Data(s["x"], s["edges"].T, s["edge_attr"], s["y"][None]) for s in samples]
        return Batch.from_data_list(graphs)

    def module(self, _):
        return Network(self.model.width)

    def loss(self, model, batch):
        energy = model(batch)
        return (energy - batch.y).square(), energy

    def measure(self, energy, batch):
        return {"error": (energy - batch.y).abs()}

    def predict(self, energy, batch):
        return {"energy": batch.y, "energy.predicted": energy}
