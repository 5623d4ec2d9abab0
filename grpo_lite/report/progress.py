"""Live progress of a run: a few lines that redraw on a terminal, one plain line a step elsewhere.

Shows what it is told and computes only the time left.
No thread of its own: it draws when a step ends, so the loop is never disturbed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_lite.report.runlog import Decision, StepRecord
from grpo_lite.units import format_bytes, format_seconds

RECENT_STEPS = 20
"""Steps whose mean time predicts the time left: lengths drift during training."""
BAR_COLUMNS = 20
"""Width of the bars, and steps of reward that are drawn."""
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Heights of the reward's curve, lowest first."""
ASCII_BLOCKS = "_.-=+*%#"
"""The same for a terminal that has ASCII only."""


class Progress:
    """What `train` shows while it runs.

    Enter it before the first step; leave it before printing anything else to the same terminal.
    """

    def __init__(self, total_steps: int, budget_bytes: int, console: Console) -> None:
        self._total_steps = total_steps
        self._budget_bytes = budget_bytes
        self._console = console
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._rewards: deque[float] = deque(maxlen=BAR_COLUMNS)
        self._decision: Decision | None = None
        self._num_decisions = 0
        self._blocks = BLOCKS if console.encoding.startswith("utf") else ASCII_BLOCKS
        self._live = Live(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
            self._live.update(Text(f"step 0/{self._total_steps}", style="dim"), refresh=True)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live.is_started:
            self._live.stop()

    def step(self, record: StepRecord) -> None:
        """Show a finished update."""
        self._recent_s.append(record.total_s)
        self._rewards.append(record.reward)
        if self._is_live:
            self._live.update(self._screen(record), refresh=True)
        else:
            self._line(self._step_line(record))

    def decision(self, decision: Decision) -> None:
        """Show a change of plan, and keep it in sight."""
        self._decision = decision
        self._num_decisions += 1
        self._line(
            f"governor: step {decision.step}, {decision.kind} in {decision.phase}: "
            f"{decision.change}"
        )

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True, highlight=False)

    def _left_s(self, step: int) -> float:
        return (self._total_steps - step) * sum(self._recent_s) / len(self._recent_s)

    def _step_line(self, record: StepRecord) -> str:
        width = len(str(self._total_steps))
        return (
            f"step {record.step:{width}}/{self._total_steps}"
            f"  reward {record.reward:.3f}"
            f"  dead {record.dead_group_fraction:.0%}"
            f"  {record.tokens_per_s:,.0f} tok/s"
            f"  {format_bytes(record.peak_bytes)} of {format_bytes(self._budget_bytes)}"
            f"  {format_seconds(self._left_s(record.step))} left"
        )

    def _screen(self, record: StepRecord) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(width=BAR_COLUMNS, no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_row(
            f"step {record.step}/{self._total_steps}",
            ProgressBar(total=self._total_steps, completed=record.step, width=BAR_COLUMNS),
            f"{format_seconds(self._left_s(record.step))} left, "
            f"{format_seconds(record.total_s)} each, {record.tokens_per_s:,.0f} tok/s",
        )
        grid.add_row(
            f"reward {record.reward:.3f}",
            Text(_sparkline(self._rewards, self._blocks), style="green"),
            f"{record.dead_group_fraction:.0%} dead groups, "
            f"{record.truncated_fraction:.0%} cut off, loss {record.loss:.4f}",
        )
        grid.add_row(
            "memory",
            ProgressBar(total=self._budget_bytes, completed=record.peak_bytes, width=BAR_COLUMNS),
            f"peak {format_bytes(record.peak_bytes)} of {format_bytes(self._budget_bytes)}"
            + (f" in {record.peak_phase}" if record.peak_phase else ""),
        )
        return Group(grid, self._governor_line())

    def _governor_line(self) -> Text:
        if self._decision is None:
            return Text("governor  nothing to do so far", style="dim")
        times = f", {self._num_decisions} in all" if self._num_decisions > 1 else ""
        return Text(
            f"governor  step {self._decision.step}{times}: {self._decision.change}",
            style="yellow",
            no_wrap=True,
            overflow="ellipsis",
        )


def _sparkline(values: Iterable[float], blocks: str) -> str:
    """Return one character a value, scaled to their range; a NaN is drawn as a question mark."""
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low or 1.0
    top = len(blocks) - 1
    return "".join(
        blocks[round((value - low) / span * top)] if math.isfinite(value) else "?"
        for value in values
    )
