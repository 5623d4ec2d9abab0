"""The report on a run: the log's own numbers, also of runs that broke off or went wrong."""

import json

import pytest
from test_html import Tags

from grpo_lite.commands.main import main
from grpo_lite.errors import UsageError
from grpo_lite.plan import Phase
from grpo_lite.report.run_render import run_to_html, run_to_markdown, run_to_text
from grpo_lite.report.run_report import run_report
from grpo_lite.report.runlog import Decision, RunLog, StepRecord, read_runlog
from grpo_lite.units import GIB, MIB


def step(number, *, reward=0.5, backward_gib=2.0, predicted_gib=2.1):
    return StepRecord(
        step=number,
        loss=0.1,
        reward=reward,
        rewards={"score": reward},
        dead_group_fraction=0.25,
        gradient_norm=1.0,
        learning_rate=1e-5,
        completion_tokens=256,
        mean_completion_tokens=4.0,
        truncated_fraction=0.5,
        seconds={Phase.ROLLOUT: 3.0, Phase.BACKWARD: 1.0},
        tokens_per_s=64.0,
        predicted_peak_bytes={Phase.ROLLOUT: GIB, Phase.BACKWARD: round(predicted_gib * GIB)},
        measured_peak_bytes={Phase.ROLLOUT: GIB, Phase.BACKWARD: round(backward_gib * GIB)},
        plan={"micro_batch": 8},
        allocated_bytes=GIB,
    )


DECISION = Decision(
    step=2,
    phase=Phase.BACKWARD,
    kind="out of memory",
    before={"micro_batch": 8},
    after={"micro_batch": 4},
    reason="out of memory in backward by 96.0 MiB",
    asked_bytes=96 * MIB,
    allocated_bytes=3 * GIB,
    budget_bytes=3 * GIB,
)


@pytest.fixture
def folder(tmp_path):
    """A finished run of ten updates, with one rescue."""
    with RunLog(tmp_path / "run.jsonl", clock=lambda: 0.0) as log:
        log.append("start", {"model": "Org/model", "card": "virtual:3GiB"})
        log.append("eval", {"step": 0, "reward": 0.25, "samples": 8})
        for number in range(1, 11):
            if number == 2:
                log.decision(DECISION)
            log.step(step(number, reward=number / 10, backward_gib=2.5 if number == 3 else 2.0))
        log.append("eval", {"step": 10, "reward": 0.75, "samples": 8})
        log.append("end", {"reason": "done", "last_step": 10})
    return tmp_path


def report_of(folder):
    return run_report(read_runlog(folder / "run.jsonl"), "run.jsonl")


def test_a_run_is_summed_up_from_its_log(folder):
    report = report_of(folder)
    assert (report.model, report.end, len(report.steps)) == ("Org/model", "done", 10)
    assert report.peak_bytes == round(2.5 * GIB)
    assert report.budget_bytes == 3 * GIB
    assert report.seconds == 40.0
    assert report.held_out == ((0, 0.25), (10, 0.75))
    text = run_to_text(report)
    assert "reward 0.100 at the start, 1.000 at the end" in text
    assert "83% of the budget of 3.00 GiB" in text
    assert "governor: update 2, backward: micro_batch 8 -> 4" in text


def test_prediction_and_measurement_are_of_the_same_update(folder):
    """The danger: the largest prediction of one update against the peak of another."""
    backward = report_of(folder).phases[-1]
    assert backward.measured_bytes == round(2.5 * GIB)
    assert backward.error_fraction == pytest.approx(2.1 / 2.5 - 1)


def test_a_killed_run_is_not_called_done(folder):
    lines = (folder / "run.jsonl").read_text().splitlines()
    (folder / "run.jsonl").write_text("\n".join(lines[:-1]) + '\n{"event": "st')
    assert report_of(folder).end == "still running, or killed"


def test_a_run_that_went_on_after_an_interruption_is_not_over(folder):
    with RunLog(folder / "run.jsonl", clock=lambda: 0.0) as log:
        log.step(step(11))
    assert report_of(folder).end == "still running, or killed"


def test_a_loss_that_is_no_number_is_drawn_as_a_gap(folder):
    with RunLog(folder / "run.jsonl", clock=lambda: 0.0) as log:
        log.step(step(11, reward=float("nan")))
    report = report_of(folder)
    assert report.curves["reward"][-1] is None
    assert "<svg" in run_to_html(report)


def test_a_log_without_an_update_says_so(folder):
    with pytest.raises(UsageError, match="no finished update"):
        run_report([{"event": "start"}], "x")


def test_a_record_of_another_program_is_refused_and_not_guessed():
    with pytest.raises(UsageError, match="reward"):
        run_report([{"event": "step", "step": 1}], "x")


def test_every_rendering_shows_the_same_decision_and_peaks(folder):
    report = report_of(folder)
    page = run_to_html(report)
    tags = Tags(page)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    assert page.count("<svg ") == 5
    for text in (
        "".join(tags.text),
        run_to_markdown(report).replace("\\", ""),
        run_to_text(report),
    ):
        assert "micro_batch 8 -> 4" in text
        assert "2.50 GiB" in text
        assert "-16.00%" in text


def test_the_command_takes_a_folder_or_a_log_and_refuses_others(folder, tmp_path, capsys):
    assert main(["report", str(folder)]) == 0
    by_folder = capsys.readouterr().out
    assert main(["report", str(folder / "run.jsonl")]) == 0
    assert capsys.readouterr().out == by_folder
    assert main(["report", str(folder / "none")]) == 2
    assert "hint:" in capsys.readouterr().err
    (folder / "other.jsonl").write_text(json.dumps({"event": "party"}) + "\n")
    assert main(["report", str(folder / "other.jsonl")]) == 2
    target = folder / "report.html"
    assert main(["report", str(folder), "--format", "html", "-o", str(target)]) == 0
    assert target.read_text().startswith("<!DOCTYPE html>")
