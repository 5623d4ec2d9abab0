"""The house rules that a reader can rely on: sizes, floors, a light import, documented names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
SOURCES = sorted(
    path
    for folder in ("grpo_lite", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
)


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_and_no_function_grows_a_tail(path: Path) -> None:
    """Good code and bad have the same median length; it is the tail that differs."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    for function in functions(path):
        assert function.end_lineno is not None
        length = function.end_lineno - function.lineno + 1
        assert length <= MAX_FUNCTION_LINES, f"{function.name} has {length} lines"


@pytest.mark.parametrize(
    "module",
    [
        "grpo_lite",
        "grpo_lite.search",
        "grpo_lite.report.render",
        "grpo_lite.predict.memory",
        "grpo_lite.commands.main",
    ],
)
def test_what_decides_and_shows_imports_no_torch(module: str) -> None:
    """A warm answer takes a second; importing torch alone takes longer."""
    code = f"import sys, {module}; assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_few_documented_and_all_there() -> None:
    import grpo_lite

    assert 0 < len(grpo_lite.__all__) <= 20
    for name in grpo_lite.__all__:
        assert (getattr(grpo_lite, name).__doc__ or "").strip(), name


def test_no_machine_path_and_no_registry_stands_in_the_project() -> None:
    """A path that exists here only would break somebody else's first ten minutes."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    words = ["/" + "work/", "/" + "root/", "pypi" + ".org", "pythonhosted" + ".org"]
    for name in filter(None, tracked):
        if not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        for word in words:
            assert word not in text, f"{name} names {word}"
