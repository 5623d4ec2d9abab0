"""How many rows fit where no trace exists: from what the rows of this very loop have taken.

`train` predicts from a footprint; in other people's loops only what was measured is known.
Bytes above rest are taken to grow with rows x tokens, from some fixed part on: a slope that was
measured at one size bounds the bytes of any larger one, so the largest slope of the nearest size
below counts.
Pure; knows no torch and no loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

QUIET_UPDATES = 8
"""Updates without an out-of-memory after which one step up is tried."""
MAX_WAIT_UPDATES = 128
"""Longest wait: what fails again and again is tried ever less often."""
SAFE_FRACTION = 0.97
"""Share of the free bytes that a prediction may fill."""


@dataclass(slots=True)
class MeasuredRows:
    """What one phase has taken so far, and how many rows it may work on at once.

    `size` is rows x tokens of the padded tensors of a part.
    """

    slopes_bytes: dict[int, float] = field(default_factory=dict)
    """Largest bytes above rest for one unit of size, by the power of two at or below the size."""
    failed_size: int | None = None
    """Smallest size that ran out of memory; nothing as large is tried in the meantime."""
    failed_free_bytes: int = 0
    """What was free when it failed."""
    quiet_updates: int = 0
    """Updates since the last out-of-memory."""
    wait_updates: int = QUIET_UPDATES
    """Quiet updates before a failed size is forgotten; doubled by every further failure."""
    has_failed: bool = False
    """Whether it ever ran out of memory."""

    def rows(self, num_rows: int, row_size: int, free_bytes: int) -> int:
        """Return how many of `num_rows` rows of `row_size` are worked on at once, at least 1."""
        usable_bytes = free_bytes * SAFE_FRACTION
        low, rows = 1, num_rows
        if self.predict(rows * row_size) > usable_bytes:
            while low + 1 < rows:
                middle = (low + rows) // 2
                fits = self.predict(middle * row_size) <= usable_bytes
                low, rows = (middle, rows) if fits else (low, middle)
            rows = low
        # What failed with less free may well fit now: more memory lifts the limit at once.
        if self.failed_size is not None and free_bytes <= self.failed_free_bytes / SAFE_FRACTION:
            rows = min(rows, (self.failed_size - 1) // row_size)
        return max(1, rows)

    def predict(self, size: int) -> float:
        """Return the bytes above rest that a part of `size` takes; 0 where nothing is known."""
        if not self.slopes_bytes:
            return 0.0
        power = size.bit_length()
        below = [known for known in self.slopes_bytes if known <= power]
        return size * self.slopes_bytes[max(below) if below else min(self.slopes_bytes)]

    def worked(self, size: int, used_bytes: int) -> None:
        """Learn that a part of `size` took `used_bytes` above rest."""
        power = size.bit_length()
        known = self.slopes_bytes.get(power, 0.0)
        self.slopes_bytes[power] = max(known, used_bytes / max(1, size))

    def failed(self, num_rows: int, row_size: int, free_bytes: int) -> int | None:
        """Learn that `num_rows` rows ran out of memory; return how many to try, None for no fewer.

        Half of them: an error early in a phase says little about what all of it would have needed.
        """
        size = num_rows * row_size
        if self.has_failed:
            self.wait_updates = min(2 * self.wait_updates, MAX_WAIT_UPDATES)
        self.has_failed = True
        self.failed_size = size if self.failed_size is None else min(size, self.failed_size)
        self.failed_free_bytes = max(self.failed_free_bytes, free_bytes)
        self.quiet_updates = 0
        return num_rows // 2 if num_rows > 1 else None

    def updated(self) -> bool:
        """Count one more quiet update; return whether the failed size is forgotten by that."""
        if self.failed_size is None:
            return False
        self.quiet_updates += 1
        if self.quiet_updates < self.wait_updates:
            return False
        self.failed_size = None
        self.failed_free_bytes = 0
        self.quiet_updates = 0
        return True
