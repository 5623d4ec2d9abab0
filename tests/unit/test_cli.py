"""The command line as users and scripts know it: flags, exit codes, and where errors go."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lite.commands.main import build_parser, main


def flags_of(command: str) -> set[str]:
    parser = build_parser()
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {
        option
        for action in actions[0].choices[command]._actions
        for option in (action.option_strings or [action.dest])
        if option not in ("-h", "--help")
    }


def test_flags_of_fit_do_not_change_by_accident() -> None:
    """Scripts and recipes of users call these: adding is fine, losing one breaks them."""
    assert flags_of("fit") >= {
        "model", "--card", "--reserve", "--allow-network", "--method", "--lora-rank", "--dtype",
        "--prompts-per-step", "--num-generations", "--max-prompt-length",
        "--max-completion-length", "--loss-type", "--beta", "--num-iterations", "--task",
        "--reward", "--steps", "--learning-rate", "--seed", "--format", "-o", "--output",
        "--recipe", "-v", "--verbose",
    }  # fmt: skip


def test_flags_of_train_do_not_change_by_accident() -> None:
    assert flags_of("train") >= {"recipe", "--output", "--steps", "--card", "-v", "--verbose"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "Qwen/Qwen2.5-0.5X", "--card", "virtual:8GiB"], ["Qwen/Qwen2.5-0.5B", "hint:"]),
        (["fit", "Qwen/Qwen-7B", "--card", "virtual:8GiB"], ["qwen", "hint:"]),
        (["fit", "Qwen/Qwen2.5-0.5B", "--card", "rtx-3080"], ["rtx-3080-laptop-16gb"]),
        (["fit", "Qwen/Qwen2.5-0.5B", "--card", "virtual:8XB"], ["8XB", "6.5GiB"]),
        (["fit", "Qwen/Qwen2.5-0.5B", "--card", "virtual:0"], ["no memory"]),
        (
            ["fit", "Qwen/Qwen2.5-0.5B", "--card", "virtual:8GiB", "--reserve", "9GiB"],
            ["9.00 GiB", "8.00 GiB"],
        ),
        (
            ["fit", "Qwen/Qwen2.5-0.5B", "--card", "virtual:8GiB", "--num-generations", "1"],
            ["num_generations", "hint:"],
        ),
        (
            ["fit", "Qwen/Qwen2.5-0.5B", "--card", "virtual:8GiB", "--method", "full",
             "--beta", "0.1"],
            ["beta", "--method lora"],
        ),
        (["train", "/nowhere/recipe.toml"], ["/nowhere/recipe.toml", "hint:"]),
    ],
)  # fmt: skip
def test_wrong_use_is_code_2_and_says_what_would_work(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that a newcomer meets in the first ten minutes must carry its own cure."""
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "Traceback" not in streams.err
    for word in words:
        assert word in streams.err


@pytest.mark.parametrize("flag", ["0", "-3", "many", "9..5", "1..x"])
def test_a_length_that_is_none_is_refused_by_the_parser(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "Qwen/Qwen2.5-0.5B", f"--max-completion-length={flag}"])
    assert stop.value.code == 2
    assert "--max-completion-length" in capsys.readouterr().err


def test_help_and_errors_of_planning_import_no_torch() -> None:
    """`grpo-lite --help` must answer at once, and so must a warm `fit`."""
    code = (
        "import sys; from grpo_lite.commands.main import main; "
        "code = main(['fit', 'no-such-model', '--card', 'virtual:8GiB']); "
        "assert code == 2, code; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_launcher_of_a_checkout_stays_a_launcher() -> None:
    text = (Path(__file__).parents[2] / "cli.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 10
