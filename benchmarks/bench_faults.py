"""An out-of-memory at every allocation of one full update: does it end in the same weights?

Ours (the governed rollout, log-probs, gradients and step of a tiny model, through `train`'s own
functions) and TRL's trainer under the governor.
`--every N` takes each N-th point; 1 takes all. The last line is flat JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "invariants"))

import torch  # noqa: E402
from loop_rig import FaultyCard, flat  # noqa: E402
from our_rig import OurLoop  # noqa: E402

from grpo_lite.errors import BudgetExceeded  # noqa: E402

MOST_DIFFERENCE = 1e-4
"""Norm of the difference of the final weights, as a share of the norm of the update."""


class Ours:
    """Two governed updates of our own loop; the second one has optimizer state already."""

    def __init__(self) -> None:
        self.name = "ours"

    def run(self, at: int | None, times: int) -> tuple[torch.Tensor, torch.Tensor, FaultyCard]:
        """Return weights before and after, and the card."""
        card = FaultyCard()
        loop = OurLoop(card)
        before = flat(loop.model)
        with card.attach():
            card.arm(at, times)
            try:
                loop.updates(2)
            finally:
                card.at = None
        return before, flat(loop.model), card


class Trl:
    """One update of TRL's trainer, evaluation and checkpoint apart."""

    def __init__(self) -> None:
        import trl_rig

        self.name = "trl"
        self.rig = trl_rig
        self.folder = tempfile.mkdtemp()

    def run(self, at: int | None, times: int) -> tuple[torch.Tensor, torch.Tensor, FaultyCard]:
        """Return weights before and after, and the card."""
        card = FaultyCard()
        trainer = self.rig.make_trainer(
            self.folder, self.rig.GovernedGRPOTrainer, card=card, max_steps=1
        )
        before = self.rig.weights(trainer)
        card.arm(at, times)
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                trainer.train()
            finally:
                card.at = None
        return before, self.rig.weights(trainer), card


def attack(subject: Ours | Trl, every: int, times: int) -> Counter[str]:
    """Fail each `every`-th allocation of `subject` and count how it ends."""
    before, wanted, card = subject.run(None, 1)
    moved = float((wanted - before).norm())
    total = card.count
    ends: Counter[str] = Counter()
    began_s = time.monotonic()
    for at in range(1, total + 1, every):
        ends["points"] += 1
        try:
            _, found, faulty = subject.run(at, times)
        except BudgetExceeded:
            ends["clean_stops"] += 1
            continue
        except Exception as error:
            ends["crashed"] += 1
            print(f"{subject.name}: allocation {at}: {type(error).__name__}: {error}")
            continue
        difference = float((found - wanted).norm()) / moved
        ends["recovered"] += 1
        ends["equal"] += difference <= MOST_DIFFERENCE
        ends["bit_equal"] += difference == 0.0
        if difference > MOST_DIFFERENCE or not faulty.fired:
            print(f"{subject.name}: allocation {at}: difference {difference:.2e}")
    seconds = time.monotonic() - began_s
    print(
        f"{subject.name}, {times} in a row: {ends['points']} of {total} allocations, "
        f"{ends['recovered']} recovered ({ends['bit_equal']} to the bit, {ends['equal']} within "
        f"{MOST_DIFFERENCE:g} of the update), {ends['clean_stops']} clean stops, "
        f"{ends['crashed']} crashes; {seconds:.0f} s"
    )
    return ends


def main() -> None:
    """Attack both loops and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="take each N-th allocation of ours")
    parser.add_argument("--trl-every", type=int, default=None, help="and of TRL's")
    parser.add_argument("--times", type=int, default=1, help="failures in a row")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    ours = attack(Ours(), arguments.every, arguments.times)
    theirs = attack(Trl(), arguments.trl_every or arguments.every, arguments.times)
    print(
        json.dumps(
            {
                "points": ours["points"],
                "recovered": ours["recovered"],
                "clean_stops": ours["clean_stops"],
                "parameters_equal": ours["equal"] == ours["recovered"],
                "trl_points": theirs["points"],
                "trl_recovered": theirs["recovered"],
                "trl_clean_stops": theirs["clean_stops"],
                "trl_parameters_equal": theirs["equal"] == theirs["recovered"],
                "crashed": ours["crashed"] + theirs["crashed"],
            }
        )
    )


if __name__ == "__main__":
    main()
