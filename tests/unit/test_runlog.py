"""The run log keeps whole records through crashes, torn lines and numbers that are not finite."""

import json
from dataclasses import replace

import pytest

from grpo_lite.errors import UsageError
from grpo_lite.plan import Phase
from grpo_lite.report.runlog import Decision, RunLog, StepRecord, read_runlog

STEP = StepRecord(
    step=3,
    loss=0.012,
    reward=0.5,
    rewards={"exact": 0.5},
    dead_group_fraction=0.375,
    gradient_norm=1.25,
    learning_rate=1e-5,
    completion_tokens=256,
    mean_completion_tokens=4.0,
    truncated_fraction=0.25,
    seconds={Phase.ROLLOUT: 2.0, Phase.BACKWARD: 3.0},
    tokens_per_s=51.2,
    predicted_peak_bytes={Phase.ROLLOUT: 100, Phase.BACKWARD: 300},
    measured_peak_bytes={Phase.ROLLOUT: 101, Phase.BACKWARD: 299},
    plan={"micro_batch": 8},
    allocated_bytes=90,
)
DECISION = Decision(
    step=3,
    phase=Phase.BACKWARD,
    kind="out of memory",
    before={"micro_batch": 8, "gradient_checkpointing": False},
    after={"micro_batch": 4, "gradient_checkpointing": True},
    reason="out of memory in backward by 1.00 GiB",
    asked_bytes=None,
    allocated_bytes=280,
    budget_bytes=300,
)


def test_records_come_back_in_order_with_their_event_and_time(tmp_path):
    path = tmp_path / "run" / "run.jsonl"
    with RunLog(path, clock=lambda: 1000.12345) as log:
        log.append("start", {"model": "tiny"})
        log.step(STEP)
        log.decision(DECISION)
        log.append("end", {"reason": "done"})
    start, step, decision, end = read_runlog(path)
    assert start == {"event": "start", "time": 1000.123, "model": "tiny"}
    assert step["seconds"] == {"rollout": 2.0, "backward": 3.0}
    assert step["measured_peak_bytes"] == {"rollout": 101, "backward": 299}
    assert decision["after"] == {"micro_batch": 4, "gradient_checkpointing": True}
    assert decision["asked_bytes"] is None
    assert end["reason"] == "done"


def test_a_record_is_on_disk_before_the_call_returns(tmp_path):
    """A killed process must not take finished steps with it."""
    log = RunLog(tmp_path / "run.jsonl")
    log.step(STEP)
    assert read_runlog(log.path)[0]["step"] == 3
    log.close()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_written_as_null(tmp_path, number):
    """Python writes NaN, which is no JSON: one diverged step would make the log unreadable."""
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log.step(replace(STEP, loss=number, rewards={"exact": number}))
    line = path.read_text()
    record = json.loads(line, parse_constant=pytest.fail)
    assert record["loss"] is None
    assert record["rewards"] == {"exact": None}


@pytest.mark.parametrize("kept_bytes", [1, 20, -1])
def test_a_torn_last_line_is_left_out_and_the_log_goes_on_behind_the_last_whole_record(
    tmp_path, kept_bytes
):
    """A crash tears the last write; appending behind it would glue two records into none."""
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log.append("start", {})
        log.step(STEP)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:kept_bytes])
    assert [record["event"] for record in read_runlog(path)] == ["start"]
    with RunLog(path) as log:
        log.append("end", {})
    assert [record["event"] for record in read_runlog(path)] == ["start", "end"]


def test_an_empty_log_has_no_records(tmp_path):
    path = tmp_path / "run.jsonl"
    RunLog(path).close()
    assert read_runlog(path) == []


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"event": "party"}', ""])
def test_a_whole_line_that_is_no_record_is_named(tmp_path, line):
    """Skipping it silently would hide that the log was edited or damaged."""
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log.append("start", {})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UsageError, match=r"line 2 of .*run\.jsonl"):
        read_runlog(path)


def test_a_step_knows_its_peak_and_its_time():
    assert STEP.peak_phase is Phase.BACKWARD
    assert STEP.peak_bytes == 299
    assert STEP.total_s == 5.0
    assert replace(STEP, measured_peak_bytes={}).peak_phase is None


def test_a_decision_tells_its_change_in_words():
    assert DECISION.change == "micro_batch 8 -> 4, gradient_checkpointing False -> True"
