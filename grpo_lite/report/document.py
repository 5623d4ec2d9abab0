"""The auto-tune report as data: everything that any rendering shows, already computed.

Pure; a renderer adds layout and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_lite.cards.card import Budget
from grpo_lite.predict.memory import Rehearsal
from grpo_lite.search import Candidate, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One tuned setting and why it has its value."""

    setting: str
    """Name of the field of the plan or workload."""
    value: str
    """The value, as text."""
    reason: str
    """Why this value and not the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to ask or to run, with its predicted price."""

    description: str
    """What is different, in words."""
    flags: str
    """Command-line flags that ask for it; empty where no flag does."""
    peak_bytes: int
    """Predicted allocated peak."""
    seconds: float
    """Predicted seconds per update."""
    verdict: Verdict
    """Whether it fits."""
    changes_experiment: bool = False
    """Whether the result of the training depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The answer to one `fit`."""

    model: str
    """The model as asked for."""
    model_note: str
    """Where its shape comes from, and of which base shape it is an alias."""
    num_parameters: int
    """All parameters, tied ones once."""
    num_trainable: int
    """Parameters with gradient."""
    card: str
    """The card's profile name."""
    card_title: str
    """The card's name for people."""
    card_note: str
    """Where its figures come from."""
    budget: Budget
    """What of the card is free for this run."""
    chosen: Candidate
    """The best candidate; where nothing fits, the one nearest to fitting."""
    choices: tuple[Choice, ...]
    """What was tuned, and why."""
    alternatives: tuple[Alternative, ...]
    """Where the choice fits: the next best. Where it does not: what would."""
    rehearsal: Rehearsal | None
    """The chosen plan's full trace; None where it was not made."""
    frontier: tuple[Alternative, ...] = ()
    """Plans of the same experiment that no other beats in both bytes and seconds."""
    trl_arguments: Mapping[str, Any]
    """Arguments of TRL's GRPOConfig that correspond to the choice."""
    recipe_path: str | None
    """The recipe file that was written; None where none was asked for."""
    assumptions: tuple[str, ...]
    """What the numbers rest on, in plain words."""
    seconds: float
    """How long the answer took."""
    num_candidates: int
    """Plans that were priced."""
    recipe_text: str | None = None
    """The recipe as TOML; None where nothing fits or none was made."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on the chosen candidate."""
        return self.chosen.verdict
