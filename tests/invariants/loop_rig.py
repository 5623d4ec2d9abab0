"""A card that runs out of memory on demand, and a loop small enough to be broken everywhere.

Shared by tests of the loops and by benchmarks/bench_faults.py.
"""

import torch
from torch import nn

from grpo_lite.cards.virtual import VirtualCard
from grpo_lite.units import GIB


class FaultyCard(VirtualCard):
    """Fails chosen allocations among all: the `at`-th from now, and the `times` - 1 after it."""

    def __init__(self, budget_bytes=GIB):
        super().__init__(budget_bytes)
        self.at, self.times, self.count, self.fired = None, 1, 0, 0
        grow = self.ledger._grow

        def counted(num_bytes):
            if num_bytes > 0:
                self.count += 1
                if self.at is not None and self.at <= self.count < self.at + self.times:
                    self.fired += 1
                    self.ledger._refuse(num_bytes)
            grow(num_bytes)

        self.ledger._grow = counted

    def arm(self, at, times=1):
        """Let the `at`-th allocation from now (from 1) fail; None: none."""
        self.at, self.times, self.count, self.fired = at, times, 0, 0


class Net(nn.Module):
    """Two layers with dropout, so that the random state matters."""

    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, inputs):
        return self.down(self.drop(torch.relu(self.up(inputs)))).squeeze(-1)


def make_loop(optimizer, *, dropout=0.1, **arguments):
    """Return a net, its optimizer and its loss, always the same."""
    torch.manual_seed(0)
    net = Net()
    net.drop.p = dropout

    def loss_fn(rows):
        return ((net(rows["x"]) - rows["y"]) ** 2).mean()

    return net, optimizer(net.parameters(), lr=1e-2, **arguments), loss_fn


def make_batch(number, num_rows=8):
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(num_rows, 8, generator=generator),
        "y": torch.randn(num_rows, generator=generator),
        "names": [f"row {row}" for row in range(num_rows)],
    }


def flat(net):
    """Return all weights as one fp64 vector."""
    return torch.cat([parameter.detach().double().flatten() for parameter in net.parameters()])
