"""What `train` shows while it runs, on a terminal and elsewhere."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from grpo_lite.plan import Phase
from grpo_lite.report.progress import Progress
from grpo_lite.report.runlog import Decision, StepRecord
from grpo_lite.units import GIB

STEP = StepRecord(
    step=1,
    loss=0.012,
    reward=0.5,
    rewards={"exact": 0.5},
    dead_group_fraction=0.375,
    gradient_norm=1.25,
    learning_rate=1e-5,
    completion_tokens=256,
    mean_completion_tokens=4.0,
    truncated_fraction=0.25,
    seconds={Phase.ROLLOUT: 4.0, Phase.BACKWARD: 6.0},
    tokens_per_s=1234.0,
    predicted_peak_bytes={},
    measured_peak_bytes={Phase.ROLLOUT: GIB, Phase.BACKWARD: 2 * GIB},
    plan={},
    allocated_bytes=GIB,
)
DECISION = Decision(
    step=2,
    phase=Phase.BACKWARD,
    kind="out of memory",
    before={"micro_batch": 8},
    after={"micro_batch": 4},
    reason="1.00 GiB too little",
    asked_bytes=GIB,
    allocated_bytes=2 * GIB,
    budget_bytes=3 * GIB,
)


def console(*, terminal=False):
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)


def test_without_a_terminal_each_step_is_one_plain_line():
    """Cursor movements make a log file unreadable, and wrapped lines cannot be searched."""
    output = console()
    with Progress(10, 3 * GIB, output) as progress:
        progress.note("before: 0.41 [64 problems]")
        progress.step(STEP)
        progress.decision(DECISION)
        progress.step(replace(STEP, step=2))
    assert output.file.getvalue().splitlines() == [
        "before: 0.41 [64 problems]",
        "step  1/10  reward 0.500  dead 38%  1,234 tok/s  2.00 GiB of 3.00 GiB  1 min 30 s left",
        "governor: step 2, out of memory in backward: micro_batch 8 -> 4",
        "step  2/10  reward 0.500  dead 38%  1,234 tok/s  2.00 GiB of 3.00 GiB  1 min 20 s left",
    ]


def test_on_a_terminal_the_last_step_and_the_last_decision_stay_in_sight():
    output = console(terminal=True)
    with Progress(10, 3 * GIB, output) as progress:
        progress.step(STEP)
        progress.decision(DECISION)
        progress.decision(
            replace(DECISION, step=3, before=DECISION.after, after={"micro_batch": 2})
        )
        progress.step(replace(STEP, step=3, reward=0.75))
    screen = output.file.getvalue().rpartition("\x1b[2K")[2]
    for words in (
        "step 3/10",
        "1 min 10 s left, 10.0 s each, 1,234 tok/s",
        "reward 0.750",
        "38% dead groups, 25% cut off, loss 0.0120",
        "peak 2.00 GiB of 3.00 GiB in backward",
        "governor  step 3, 2 in all: micro_batch 4 -> 2",
    ):
        assert words in screen


def test_the_terminal_is_given_back_when_training_fails():
    """A live display left running hides the cursor and eats the error message."""
    output = console(terminal=True)

    def interrupted():
        with Progress(10, 3 * GIB, output) as progress:
            progress.step(STEP)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert output.file.getvalue().endswith("\x1b[?25h")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_whose_numbers_are_not_finite_is_shown(terminal):
    """Progress must not be what stops a run that diverged."""
    output = console(terminal=terminal)
    broken = replace(
        STEP, reward=float("nan"), loss=float("inf"), measured_peak_bytes={}, seconds={}
    )
    with Progress(10, 3 * GIB, output) as progress:
        progress.step(broken)
    assert "reward nan" in output.file.getvalue()


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch):
    """A live display shows nothing there until the run is over."""
    monkeypatch.setenv("TERM", "dumb")
    output = console(terminal=True)
    with Progress(10, 3 * GIB, output) as progress:
        progress.step(STEP)
        assert output.file.getvalue().startswith("step  1/10  reward 0.500")


def test_time_left_follows_the_recent_steps():
    """Completions grow during training: the mean over the whole run would promise too much."""
    output = console()
    with Progress(100, 3 * GIB, output) as progress:
        for step in range(1, 31):
            progress.step(replace(STEP, step=step, seconds={Phase.ROLLOUT: 1.0}))
        for step in range(31, 51):
            progress.step(replace(STEP, step=step, seconds={Phase.ROLLOUT: 60.0}))
    assert output.file.getvalue().splitlines()[-1].endswith("50 min 00 s left")
