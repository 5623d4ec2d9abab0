"""A small model, its data, and the slow twin of the block engine: plain torch on fp32 masters.

Shared by tests of the engine and by benchmarks/bench_offload.py.
"""

import os

import torch
from torch import nn

from grpo_lite.offload.blocks import ParameterShape, lay_out
from grpo_lite.offload.disk_files import FileIO
from grpo_lite.offload.placement import (
    ALL_ON_DISK,
    ON_CARD,
    ON_HOST,
    STATE_ON_DISK,
    Placement,
    tier_bytes,
)


class Layer(nn.Module):
    """A gateless feed-forward block, its parameters in the order of use."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, hidden):
        return hidden + self.down(nn.functional.silu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """An embedding tied to the head, layers, odd sizes everywhere, and an unused parameter."""

    def __init__(self, width=52, vocabulary=301, num_layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        self.unused = nn.Parameter(torch.zeros(77))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def make_model(dtype=torch.bfloat16, seed=0, **sizes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model(**sizes).to(dtype)


def loss_of(model, number):
    """A loss that depends on nothing but the weights and `number`."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 301, (4, 9), generator=generator)
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def groups_of(model, weight_decay=0.1):
    """Decay matrices only, as people do."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [item for item in named if item[1].ndim > 1], "weight_decay": weight_decay},
        {"params": [item for item in named if item[1].ndim <= 1], "weight_decay": 0.0},
    ]


def schedule(step):
    """Warm up and decay."""
    return min(1.0, (step + 1) / 5) * (1 - step / 40)


class Twin:
    """The same update by `torch.optim.AdamW(fused=True)` over fp32 masters, nothing offloaded."""

    def __init__(self, model, lr):
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = {p: nn.Parameter(p.detach().float().clone()) for p in self.parameters}
        groups = [
            {**group, "params": [self.masters[p] for _, p in group["params"]]}
            for group in groups_of(model)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)

    def accumulate(self):
        """Add the gradients of the last backward in fp32."""
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            master = self.masters[parameter]
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None

    def norm64(self):
        """The gradient's norm in fp64."""
        return (
            sum(
                float(m.grad.double().pow(2).sum())
                for m in self.masters.values()
                if m.grad is not None
            )
            ** 0.5
        )

    @torch.no_grad()
    def step(self, divisor):
        """Clip by what the engine divided by, update, and copy to the weights."""
        for master in self.masters.values():
            if master.grad is not None and divisor is not None:
                master.grad.div_(torch.tensor(divisor, dtype=torch.float32))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        for parameter, master in self.masters.items():
            parameter.copy_(master)


HOMES = {
    "card": [ON_CARD],
    "ram": [ON_HOST],
    "disk": [STATE_ON_DISK],
    "gradients on disk too": [ALL_ON_DISK],
    "all three": [STATE_ON_DISK, ON_HOST, ON_CARD],
}


def budgets(model, tier, block_bytes):
    """Return the arguments of `OffloadedAdamW` that leave no choice but `tier`.

    With "all three", a third of the blocks lies on each.
    """
    layout = lay_out(
        [
            ParameterShape(name=n, num_elements=p.numel(), element_bytes=p.itemsize, identity=id(p))
            for n, p in model.named_parameters()
        ],
        block_bytes=block_bytes,
    )
    homes = HOMES[tier]
    count = len(layout.blocks)
    if len(homes) > count:
        return None
    placement = Placement(homes=tuple(homes[i * len(homes) // count] for i in range(count)))
    needed = tier_bytes(layout, placement)
    found = {"card_bytes": needed.card_bytes, "host_bytes": needed.host_bytes}
    return found | ({"disk_bytes": needed.disk_bytes * 2} if needed.disk_bytes else {})


class FaultyIO(FileIO):
    """Fails one chosen system call among many: the `at`-th of its kind from now."""

    KINDS = ("short write", "EIO write", "ENOSPC write", "EIO read", "bit flip", "short read")

    def __init__(self):
        self.kind = None
        self.at = 0
        self.times = 1
        self.fired = 0

    def arm(self, kind, at, times=1):
        """Let the `at`-th call of `kind`'s sort from now fail, and the `times` - 1 after it."""
        self.kind, self.at, self.times, self.fired = kind, at, times, 0

    def disarm(self):
        self.kind = None

    def _now(self, verb):
        if self.kind is None or not self.kind.endswith(verb):
            return False
        self.at -= 1
        if self.at >= 0 or self.fired >= self.times:
            return False
        self.fired += 1
        return True

    def pwrite(self, fd, data, offset):
        if self._now("write"):
            if self.kind == "short write":
                return super().pwrite(fd, data[: max(len(data) // 2 // 4096, 1) * 4096], offset)
            code = 28 if self.kind == "ENOSPC write" else 5
            raise OSError(code, os.strerror(code))
        return super().pwrite(fd, data, offset)

    def preadv(self, fd, into, offset):
        flips = self.kind == "bit flip" and self._now("flip")
        if not flips and self._now("read"):
            if self.kind == "short read":
                return super().preadv(fd, into[: max(len(into) // 2 // 4096, 1) * 4096], offset)
            raise OSError(5, os.strerror(5))
        count = super().preadv(fd, into, offset)
        if flips:
            into[count // 3] ^= 16
        return count
