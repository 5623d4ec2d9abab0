"""What can go wrong, each with its exit code.

GrpoLiteError
  UsageError (ValueError)   bad flag, unknown card, unreadable config           exit 2
  NoPlanFits                nothing in the search fits the budget                exit 3
  BudgetExceeded            the governor is out of moves                         exit 4
  StoreError (OSError)      a tier is full or lost a block                       exit 1
  RewardError               a reward function failed or broke its contract       exit 1

A message says what is wrong with the numbers; `hint` is a change that would work.
"""

import difflib
from collections.abc import Iterable


class GrpoLiteError(Exception):
    """Base of everything that grpo-lite raises for a user to read."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UsageError(GrpoLiteError, ValueError):
    """The caller asked for something that cannot be meant: a bad flag, name, file or field."""

    exit_code = 2


class NoPlanFits(GrpoLiteError):
    """No plan of the search fits the budget."""

    exit_code = 3


class BudgetExceeded(GrpoLiteError):
    """Out of memory, and no lower plan exists."""

    exit_code = 4


class StoreError(GrpoLiteError, OSError):
    """A block store is full, unreachable or gave back something else than was put in."""


class RewardError(GrpoLiteError):
    """A reward function raised, returned the wrong number of rewards, or a non-finite one."""


def unknown_name(
    kind: str, name: str, known: Iterable[str], *, hint: str | None = None
) -> UsageError:
    """Return the error for an unknown `kind` called `name`, listing the nearest known names."""
    names = sorted(known)
    begun = [known_name for known_name in names if known_name.startswith(name)]
    similar = difflib.get_close_matches(name, names, n=5, cutoff=0.4)
    near = list(dict.fromkeys([*begun, *similar]))[:6]
    listed = ", ".join(near or names[:8])
    label = "nearest known" if near else "known"
    return UsageError(f"unknown {kind} {name!r}; {label}: {listed}", hint=hint)
