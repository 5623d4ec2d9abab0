"""The auto-tune report for programs: flat keys, bytes as ints, seconds as floats.

The keys are documented in docs/report-json.md; removing one or changing its meaning raises SCHEMA.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from grpo_lite.plan import Category
from grpo_lite.report.document import Document

SCHEMA = 1
"""Version of the keys."""


def document_to_json(document: Document) -> str:
    """Return `document` as one JSON object, ending in a newline."""
    chosen, budget = document.chosen, document.budget
    plan = asdict(chosen.plan)
    del plan["reasons"]  # they stand in "choices", beside their values
    data = {
        "schema": SCHEMA,
        "verdict": document.verdict,
        "model": document.model,
        "model_note": document.model_note,
        "num_parameters": document.num_parameters,
        "num_trainable": document.num_trainable,
        "card": document.card,
        "card_title": document.card_title,
        "card_note": document.card_note,
        "budget_bytes": budget.card_bytes,
        "total_bytes": budget.total_bytes,
        "runtime_bytes": budget.runtime_bytes,
        "held_by_others_bytes": budget.held_by_others_bytes,
        "reserve_bytes": budget.reserve_bytes,
        "host_bytes": budget.host_bytes,
        "uncertainty_fraction": budget.uncertainty_fraction,
        "peak_bytes": chosen.memory.allocated_peak_bytes,
        "missing_bytes": max(0, chosen.memory.allocated_peak_bytes - budget.card_bytes),
        "peak_phase": chosen.memory.peak.phase,
        "peak_where": chosen.memory.peak.where,
        "seconds_per_update": chosen.speed.seconds,
        "tokens_per_s": chosen.speed.tokens_per_s,
        "num_rows": chosen.workload.num_rows,
        "workload": asdict(chosen.workload),
        "plan": plan,
        "phases": _phases(document),
        "largest_at_peak": [
            {
                "category": group.category,
                "operation": group.operation,
                "arithmetic": group.arithmetic,
                "bytes": group.num_bytes,
            }
            for group in chosen.memory.peak.largest
        ],
        "choices": [asdict(choice) for choice in document.choices],
        "alternatives": [asdict(other) for other in document.alternatives],
        "frontier": [asdict(other) for other in document.frontier],
        "rehearsal_s": document.rehearsal and document.rehearsal.seconds,
        "trl_arguments": dict(document.trl_arguments),
        "recipe_path": document.recipe_path,
        "assumptions": document.assumptions,
        "num_candidates": document.num_candidates,
        "answer_s": document.seconds,
    }
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _phases(document: Document) -> list[dict[str, Any]]:
    speeds = {speed.phase: speed for speed in document.chosen.speed.phases}
    rehearsed = document.rehearsal.peak_bytes if document.rehearsal else {}
    rows = []
    for estimate in document.chosen.memory.phases:
        speed = speeds.get(estimate.phase)
        rows.append(
            {
                "phase": estimate.phase,
                "peak_bytes": estimate.allocated_bytes,
                "rehearsed_peak_bytes": rehearsed.get(estimate.phase),
                **{f"{name}_bytes": estimate.by_category.get(name, 0) for name in Category},
                "where": estimate.where,
                "seconds": speed.seconds if speed else None,
                "bound_by": speed.bound_by if speed else None,
            }
        )
    return rows
