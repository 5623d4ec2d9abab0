"""Whole runs through the command line: what a user types, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import make_model_folder, make_recipe, make_reward, make_task

from grpo_lite.commands.main import main
from grpo_lite.plan import Phase
from grpo_lite.recipe import Recipe, RewardSettings, read_recipe, write_recipe
from grpo_lite.report.runlog import read_runlog


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep footprints of all these runs in one folder that is not the user's."""
    base = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))


def run(recipe: Recipe, folder: Path, name: str) -> Path:
    """Train `recipe` through the command line; return the run folder."""
    path = folder / f"{name}.toml"
    write_recipe(recipe, path)
    out = folder / name
    assert main(["train", str(path), "--output", str(out)]) == 0
    return out


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    return load_file(run_folder / "final" / "model.safetensors")


def relative_difference(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> float:
    """Return the norm of the difference as a share of the norm of what training changed."""
    difference = sum(float((one[k] - other[k]).square().sum()) for k in one)
    moved = sum(float((one[k] - start[k]).square().sum()) for k in one)
    assert moved > 0, "the run did not train"
    return (difference / moved) ** 0.5


def test_fit_writes_a_recipe_that_train_runs_and_transformers_loads_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first ten minutes of a newcomer: a broken hand-over between commands loses them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_model_folder(tmp_path / "model")
    recipe = tmp_path / "recipe.toml"
    flags = ["--card", "virtual:64MiB", "--method", "full", "--prompts-per-step", "2"]
    flags += ["--num-generations", "4", "--max-prompt-length", "16"]
    flags += ["--max-completion-length", "6", "--task", str(make_task(tmp_path))]
    flags += ["--reward", f"{make_reward(tmp_path)}:score", "--steps", "2"]
    assert main(["fit", str(model), *flags, "--recipe", str(recipe)]) == 0
    assert "grpo-lite train" in capsys.readouterr().out
    out = tmp_path / "run"
    assert main(["train", str(recipe), "--output", str(out)]) == 0
    assert read_recipe(out / "recipe.toml") == read_recipe(recipe)
    events = [record["event"] for record in read_runlog(out / "run.jsonl")]
    assert events == ["start", "step", "step", "end"]
    AutoModelForCausalLM.from_pretrained(out / "final")
    assert AutoTokenizer.from_pretrained(out / "final").eos_token == "<eos>"


def test_prediction_meets_measurement_in_every_phase_of_a_run(tmp_path: Path) -> None:
    """What the report promises must be what the ledger of the run sees."""
    out = run(make_recipe(tmp_path), tmp_path, "run")
    last = [r for r in read_runlog(out / "run.jsonl") if r["event"] == "step"][-1]
    assert set(last["measured_peak_bytes"]) == {"rollout", "forward", "backward", "step"}
    for phase, measured in last["measured_peak_bytes"].items():
        assert measured == pytest.approx(last["predicted_peak_bytes"][phase], rel=0.01), phase


def test_the_split_into_micro_batches_does_not_change_what_is_learnt(tmp_path: Path) -> None:
    """Micro-batch 1 x 8 must train as 8 x 1, or every rescue would change the experiment."""
    recipe = make_recipe(tmp_path)
    start = load_file(Path(recipe.model) / "model.safetensors")
    whole = weights(run(recipe, tmp_path, "whole"))
    small = replace(
        recipe.plan,
        micro_batch=1,
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
        logprob_chunk_tokens=3,
        rollout_batch=3,
    )
    split = weights(run(replace(recipe, plan=small), tmp_path, "split"))
    assert relative_difference(whole, split, start) < 1e-4


@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.BACKWARD])
def test_a_run_that_meets_out_of_memory_ends_with_the_same_weights(
    tmp_path: Path, phase: Phase
) -> None:
    """The governor's promise, through the real command line: rescued, and the same experiment."""
    recipe = make_recipe(tmp_path)
    if phase is Phase.ROLLOUT:
        wide = replace(recipe.workload, prompts_per_step=10)
        narrow = replace(
            recipe.plan,
            micro_batch=1,
            gradient_accumulation_steps=40,
            gradient_checkpointing=True,
            logprob_chunk_tokens=6,
            rollout_batch=40,
        )
        recipe = replace(recipe, workload=wide, plan=narrow)
    start = load_file(Path(recipe.model) / "model.safetensors")
    ample = run(recipe, tmp_path, "ample")
    steps = [r for r in read_runlog(ample / "run.jsonl") if r["event"] == "step"]
    budget = max(r["measured_peak_bytes"][phase] for r in steps) - 1
    tight = replace(recipe, card=f"virtual:{budget}")
    rescued = run(tight, tmp_path, "rescued")
    decisions = [r for r in read_runlog(rescued / "run.jsonl") if r["event"] == "decision"]
    assert phase in {decision["phase"] for decision in decisions}
    assert relative_difference(weights(ample), weights(rescued), start) < 1e-4
    peaks = [
        max(r["measured_peak_bytes"].values())
        for r in read_runlog(rescued / "run.jsonl")
        if r["event"] == "step"
    ]
    assert max(peaks) <= budget


def test_a_budget_that_nothing_fits_ends_with_code_4_and_a_whole_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path)
    size = sum(t.numel() * 4 for t in load_file(Path(recipe.model) / "model.safetensors").values())
    path = tmp_path / "recipe.toml"
    write_recipe(replace(recipe, card=f"virtual:{size + 20_000}"), path)
    assert main(["train", str(path), "--output", str(tmp_path / "run")]) == 4
    assert "no lower plan is left" in capsys.readouterr().err
    end = read_runlog(tmp_path / "run" / "run.jsonl")[-1]
    assert (end["event"], end["reason"], end["last_step"]) == ("end", "failed", 0)


def test_a_budget_below_the_weights_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.toml"
    write_recipe(make_recipe(tmp_path, card="virtual:10KiB"), path)
    assert main(["train", str(path), "--output", str(tmp_path / "run")]) == 3
    assert "nothing was loaded" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("float('nan')", "nan"),
        ("1) for c in completions][1:] + [(1", "1"),
    ],
)
def test_a_reward_that_breaks_its_contract_ends_the_run_with_its_log_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, message: str
) -> None:
    """Hours of training must not end in a bare traceback from somebody's reward."""
    recipe = make_recipe(tmp_path)
    reward = make_reward(tmp_path, body)
    recipe = replace(recipe, reward=RewardSettings(functions=[f"{reward}:score"]))
    path = tmp_path / "recipe.toml"
    write_recipe(recipe, path)
    assert main(["train", str(path), "--output", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert "score" in error
    assert message in error
    assert read_runlog(tmp_path / "run" / "run.jsonl")[-1]["event"] == "end"


def test_an_earlier_run_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path)
    out = run(recipe, tmp_path, "run")
    before = (out / "run.jsonl").read_bytes()
    assert main(["train", str(tmp_path / "run.toml"), "--output", str(out)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert (out / "run.jsonl").read_bytes() == before


def test_lora_with_a_kl_term_trains_and_leaves_an_adapter(tmp_path: Path) -> None:
    """The reference model is the base with its adapters off; at step 1 the KL is exactly 0."""
    recipe = make_recipe(tmp_path)
    lora = replace(recipe.workload, method="lora", beta=0.04, lora_rank=4, lora_alpha=8)
    out = run(replace(recipe, workload=lora), tmp_path, "run")
    steps = [r for r in read_runlog(out / "run.jsonl") if r["event"] == "step"]
    assert steps[0]["metrics"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert "logprob" in steps[0]["measured_peak_bytes"]
    assert (out / "final" / "adapter_model.safetensors").is_file()


def test_several_updates_from_one_rollout_move_the_ratio_away_from_one(tmp_path: Path) -> None:
    """With num_iterations above 1 the second update must see stored old log-probs."""
    recipe = make_recipe(tmp_path)
    twice = replace(recipe.workload, num_iterations=2)
    out = run(replace(recipe, workload=twice), tmp_path, "run")
    ratios = [r["metrics"]["ratio"] for r in read_runlog(out / "run.jsonl") if r["event"] == "step"]
    assert any(abs(ratio - 1) > 1e-4 for ratio in ratios)


def test_ctrl_c_leaves_a_whole_log_and_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """Somebody stops the run at night: the last whole update must be there in the morning."""
    from transformers import AutoModelForCausalLM

    recipe = make_recipe(tmp_path)
    path = tmp_path / "recipe.toml"
    write_recipe(replace(recipe, training=replace(recipe.training, steps=10_000)), path)
    command = [sys.executable, "-m", "grpo_lite.commands", "train", str(path)]
    log = tmp_path / "run" / "run.jsonl"
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "run")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (
            log.exists() and log.read_text().count('"event": "step"') >= 2
        ):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    records = read_runlog(log)
    assert records[-1]["reason"] == "interrupted"
    step = records[-1]["last_step"]
    assert step == records[-2]["step"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")


def test_json_report_of_a_question_that_does_not_fit_has_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model_folder(tmp_path / "model")
    flags = ["--card", "virtual:200KiB", "--method", "full", "--format", "json"]
    assert main(["fit", str(model), *flags]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    assert report["verdict"] == "does not fit"
