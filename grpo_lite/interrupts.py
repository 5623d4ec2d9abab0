"""Ctrl-C and SIGTERM at the right moment: at once, but never with half an update in the weights.

Knows nothing of training; who updates weights raises `shielded` meanwhile.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Whether an interruption may come now, and whether one has been asked for."""

    def __init__(self) -> None:
        self.shielded = False
        self.requested = False

    def raise_if_requested(self) -> None:
        """Raise the KeyboardInterrupt that was held back, if any."""
        if self.requested:
            raise KeyboardInterrupt

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM inside; a second one while shielded is not held back."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.shielded and not self.requested:
                self.requested = True
                return
            raise KeyboardInterrupt

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, stop) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)
