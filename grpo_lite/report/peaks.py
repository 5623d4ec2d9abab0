"""Predicted against measured peaks as a table: the test that every run makes of the predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from grpo_lite.plan import Phase
from grpo_lite.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRow:
    """The peaks of one phase over a run."""

    phase: Phase
    """The phase."""
    planned_bytes: int
    """What fit predicted at the length caps."""
    predicted_bytes: int
    """What is predicted for the shapes that ran, at the step of the measured peak."""
    measured_bytes: int
    """The largest measured allocated peak."""

    @property
    def error_fraction(self) -> float | None:
        """Predicted against measured, above zero where too much; None where nothing was held."""
        if self.measured_bytes == 0:
            return None
        return self.predicted_bytes / self.measured_bytes - 1


def peak_table(rows: Sequence[PeakRow]) -> Table:
    """Return the table of predicted and measured allocated peaks, by phase."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("allocated peak")
    for title in ("planned at the caps", "predicted as run", "measured", "error"):
        table.add_column(title, justify="right")
    for row in rows:
        error = row.error_fraction
        table.add_row(
            Text(row.phase),
            Text(format_bytes(row.planned_bytes)),
            Text(format_bytes(row.predicted_bytes)),
            Text(format_bytes(row.measured_bytes)),
            Text("" if error is None else f"{error:+.2%}"),
        )
    return table
