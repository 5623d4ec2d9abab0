"""What governing costs when nothing happens, and what it survives when everything moves.

Overhead and extra peak: a plain loop and the same loop under `Governor`, interleaved, on one card
each; medians of paired differences.
Soak: updates of our own loop and of a plain loop with a budget drawn anew every few steps between
what the smallest plan needs and ample, and with rows of random length.
The last line is flat JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "invariants"))

import torch  # noqa: E402
from loop_rig import FaultyCard, flat  # noqa: E402
from our_rig import OurLoop, tiny_workload  # noqa: E402
from torch import nn  # noqa: E402

from grpo_lite import Governor, VirtualCard  # noqa: E402
from grpo_lite.errors import BudgetExceeded  # noqa: E402
from grpo_lite.search import least_memory  # noqa: E402
from grpo_lite.units import GIB, format_bytes  # noqa: E402

REDRAW_UPDATES = 5
"""Updates after which the soak draws another budget."""


def make(width: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., torch.Tensor]]:
    """Return a net, its optimizer and its loss, always the same."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def loss_fn(rows: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = net(rows["x"])
        return out.square().mean()

    return net, optimizer, loss_fn


def rows_of(number: int, width: int, num_rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return one batch [rows, tokens, width]."""
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(num_rows, tokens, width, generator=generator)}


def overhead(pairs: int) -> tuple[float, int]:
    """Return the median share of step time that governing adds, and the bytes of extra peak."""
    width, num_rows, tokens = 256, 64, 64
    plain_net, plain_optimizer, plain_loss = make(width)
    governed_net, governed_optimizer, governed_loss = make(width)
    card, plain_card = VirtualCard(8 * GIB), VirtualCard(8 * GIB)
    governor = Governor(card)
    batch = rows_of(0, width, num_rows, tokens)

    def plain() -> None:
        plain_loss(batch).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad(set_to_none=True)

    def governed() -> None:
        governor.accumulate(batch, governed_loss, governed_optimizer)

    # Both under a ledger, so that the ledger's own cost is in neither difference.
    def timed(step: Callable[[], None], ledger: VirtualCard) -> float:
        with ledger.attach():
            began_s = time.perf_counter()
            step()
            return time.perf_counter() - began_s

    plain_card.adopt(plain_net.parameters())
    card.adopt(governed_net.parameters())
    differences, plains = [], []
    for number in range(pairs + 3):
        order = [(plain, plain_card), (governed, card)]
        seconds = {}
        for step, ledger in order if number % 2 else reversed(order):
            ledger.reset_peak()
            seconds[step is plain] = timed(step, ledger)
        if number >= 3:
            differences.append(seconds[False] - seconds[True])
            plains.append(seconds[True])
    plain_card.reset_peak()
    timed(plain, plain_card)
    extra_bytes = max(r.measured_bytes for r in governor.records.values()) - plain_card.peak_bytes()
    fraction = statistics.median(differences) / statistics.median(plains)
    print(
        f"overhead: {fraction:.2%} of a step of {statistics.median(plains) * 1e3:.1f} ms "
        f"({pairs} pairs), extra peak {extra_bytes} bytes"
    )
    return fraction, extra_bytes


def used_share(record: Any, num_rows: int, resting: int, budget: int) -> float:
    """Return the used share of the budget or of what the largest useful plan needs.

    Useful is what saves a part: where fewer parts would not fit, this plan is the largest.
    """
    parts = math.ceil(num_rows / record.num_rows)
    if parts == 1:
        return 1.0
    larger = math.ceil(num_rows / (parts - 1))
    would_need = resting + (record.measured_bytes - resting) * larger / record.num_rows
    return 1.0 if would_need > budget else float(record.measured_bytes / budget)


def soak_loop(updates: int) -> tuple[int, float, float]:
    """Return failures, the median used share of the budget, and the difference of weights."""
    width, num_rows = 64, 24
    net, optimizer, loss_fn = make(width)
    twin, twin_optimizer, twin_loss = make(width)
    start = flat(net)
    card = VirtualCard(GIB)
    governor = Governor(card)
    chance = random.Random(0)
    used, failures = [], 0
    for number in range(updates):
        tokens = chance.randint(4, 48)
        batch = rows_of(number, width, num_rows, tokens)
        with governor.governing(net.parameters()):
            resting = card.allocated_bytes()
            needed = resting + 3 * sum(p.nbytes for p in net.parameters())
        # Ample: more than all rows of the longest batch take.
        ample = needed + 4 * num_rows * 48 * 4 * width * 4
        if number % REDRAW_UPDATES == 0:
            card.budget_bytes = chance.randint(needed + 48 * 32 * width * 4, ample)
        governor.records.clear()
        try:
            governor.accumulate(batch, loss_fn, optimizer)
        except BudgetExceeded as error:
            failures += 1
            print(f"update {number}: {error}")
        twin_loss(batch).backward()
        twin_optimizer.step()
        twin_optimizer.zero_grad(set_to_none=True)
        record = governor.records.get("backward")
        if record is not None:
            used.append(used_share(record, num_rows, resting, card.budget_bytes))
    difference = float((flat(net) - flat(twin)).norm() / (flat(twin) - start).norm())
    print(
        f"soak, any loop: {updates} updates, {governor.num_rescues} rescues, {failures} failures, "
        f"budget used {statistics.median(used):.1%} at the median, "
        f"weights differ by {difference:.1e} of the update"
    )
    return failures, statistics.median(used), difference


def soak_ours(updates: int) -> tuple[int, int]:
    """Return failures of our own loop under a moving budget, and bytes leaked."""
    workload = tiny_workload(num_iterations=1)
    card = FaultyCard()
    loop = OurLoop(card, workload=workload)
    chance = random.Random(1)
    failures = 0
    # The smallest plan at the length caps, beside what the loop itself keeps on the "card".
    low = round(
        1.03 * least_memory(loop.governor.question.footprint, workload).allocated_peak_bytes
    )
    high = 2 * low
    with card.attach():
        loop.updates(2)
        loop.governor.begin_update(3)
        resting = card.allocated_bytes()
        for number in range(updates):
            if number % REDRAW_UPDATES == 0:
                card.budget_bytes = chance.randint(low, high)
            try:
                loop.update(number + 3)
            except BudgetExceeded as error:
                failures += 1
                print(f"update {number}: {error}")
        leaked = card.allocated_bytes() - resting
    print(
        f"soak, ours: {updates} updates with {format_bytes(low)} to {format_bytes(high)}, "
        f"{len(loop.decisions)} decisions, {failures} failures, {leaked} bytes leaked"
    )
    return failures, leaked


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soak", type=int, default=2000, help="updates of the soak")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of the overhead")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    fraction, extra_bytes = overhead(arguments.pairs)
    failures, used, difference = soak_loop(arguments.soak // 2)
    ours, leaked = soak_ours(arguments.soak - arguments.soak // 2)
    print(
        json.dumps(
            {
                "overhead_fraction": round(fraction, 5),
                "extra_peak_bytes": extra_bytes,
                "budget_used_median": round(used, 4),
                "soak_updates": arguments.soak,
                "soak_failures": failures + ours,
                "soak_difference": difference,
                "soak_leaked_bytes": leaked,
            }
        )
    )


if __name__ == "__main__":
    main()
