"""grpo-lite: a memory governor for GRPO on one consumer GPU.

Public names are loaded when they are first used: importing the package costs no torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "BudgetExceeded": "grpo_lite.errors",
    "FitRequest": "grpo_lite.fit",
    "Governor": "grpo_lite.loops",
    "GrpoLiteError": "grpo_lite.errors",
    "OffloadedAdamW": "grpo_lite.offload.adamw",
    "Plan": "grpo_lite.plan",
    "UsageError": "grpo_lite.errors",
    "VirtualCard": "grpo_lite.cards.virtual",
    "Workload": "grpo_lite.plan",
    "fit": "grpo_lite.fit",
    "footprint": "grpo_lite.module_footprint",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Return the public `name`, imported on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES[name])
    # All its names at once: importing the module `fit` would hide the function `fit`.
    names = [other for other, place in _HOMES.items() if place == home.__name__]
    globals().update({other: getattr(home, other) for other in names})
    return globals()[name]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(_HOMES)
