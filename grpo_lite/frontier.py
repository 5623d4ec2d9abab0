"""The plans worth looking at: those that no other beats in both bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterable

from grpo_lite.report.document import Alternative
from grpo_lite.search import Candidate


def frontier(candidates: Iterable[Candidate]) -> tuple[Alternative, ...]:
    """Return the Pareto set of `candidates` in peak bytes and seconds, fewest bytes first."""
    found: list[Alternative] = []
    order = sorted(candidates, key=lambda c: (c.memory.allocated_peak_bytes, c.speed.seconds))
    for candidate in order:
        if found and candidate.speed.seconds >= found[-1].seconds:
            continue
        plan = candidate.plan
        checkpointed = ", checkpointed" if plan.gradient_checkpointing else ""
        found.append(
            Alternative(
                description=f"micro-batch {plan.micro_batch}{checkpointed}",
                flags="",
                peak_bytes=candidate.memory.allocated_peak_bytes,
                seconds=candidate.speed.seconds,
                verdict=candidate.verdict,
            )
        )
    return tuple(found)
