"""Where the data that ships with grpo-lite lies: in the wheel, or beside the package in a checkout.

Knows one folder and nothing of what is in it.
"""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path


def profiles_root() -> Traversable:
    """Return the folder that holds `cards/` and `models/`."""
    installed = files("grpo_lite") / "profiles"
    return installed if installed.is_dir() else Path(__file__).resolve().parent.parent / "profiles"
