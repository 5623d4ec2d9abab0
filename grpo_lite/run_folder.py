"""The folder of one run: recipe, plan, log, checkpoints, final weights.

Folders of weights appear whole or not at all, by one rename.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_lite.errors import StoreError, UsageError
from grpo_lite.recipe import Recipe, write_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where everything of one run lies."""

    path: Path
    """The folder."""

    @property
    def log(self) -> Path:
        """The JSON-lines log."""
        return self.path / "run.jsonl"

    @property
    def final(self) -> Path:
        """The final weights."""
        return self.path / "final"

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the weights after update number `step`."""
        return self.path / "checkpoints" / f"step-{step:06d}"


def create_run_folder(path: Path, recipe: Recipe) -> RunFolder:
    """Return a new run folder with `recipe` and its plan in it.

    Raises:
        UsageError: there is a run in `path` already.
        StoreError: the folder cannot be made.
    """
    folder = RunFolder(path=path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(
            f"{path} exists and is not empty",
            hint=f"--output {path}-2, or remove the folder of the earlier run",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, path / "recipe.toml")
        plan = dataclasses.asdict(recipe.plan)
        (path / "plan.json").write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"the run folder {path} cannot be made: {error.strerror}") from error
    return folder


def save_whole(target: Path, save: Callable[[Path], None]) -> None:
    """Call `save` with a temporary folder beside `target`, then put it in the place of `target`.

    Raises:
        StoreError: the disk is full or cannot be written; what was there before is kept.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StoreError(f"{target} cannot be written: {error.strerror or error}") from error
