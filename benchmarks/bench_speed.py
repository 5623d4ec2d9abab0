"""Predicted against measured seconds of an update on this machine's processor.

Twelve configurations of two random models run the very functions of `train` (sampling, forward,
backward, step) at their length caps. The rates that a profile holds are measured anew just before
each update, so that what else the machine does in the meantime weighs on both alike.
For one question every micro-batch is run as well, to see how far the picked plan is from the
fastest.

    OMP_NUM_THREADS=1 python benchmarks/bench_speed.py [--quick] [--cards measured.json]

`--cards` holds predictions from datasheet profiles against other people's step times, a JSON list.
Only full and LoRA fine-tuning at an exact length can be asked; `--only-cards` asks nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from grpo_lite.cards.card import Budget
from grpo_lite.cards.measure import Pace, measure_copy, measure_flops, measure_launch_s
from grpo_lite.cards.profile import CardProfile, load_profile, virtual_profile
from grpo_lite.errors import UsageError
from grpo_lite.grpo.batch import MicroBatch, RolloutBatch
from grpo_lite.grpo.objective import Normalizers
from grpo_lite.grpo.policy import add_adapters, prepare_policy, set_checkpointing, weights_dtype
from grpo_lite.grpo.rollout import Sampling, generate_slice
from grpo_lite.grpo.update import UpdateData, begin_gradients, make_policy, micro_batch_loss
from grpo_lite.models import check_config, resolve_model
from grpo_lite.offload.resident import ResidentEngine
from grpo_lite.optimizers import optimizer_row
from grpo_lite.plan import Phase, Plan, Workload
from grpo_lite.predict.footprint import Footprint
from grpo_lite.predict.speed import SpeedEstimate, estimate_speed
from grpo_lite.search import Question, price
from grpo_lite.trace.build import build_config
from grpo_lite.trace.footprint import trace_footprint

MODELS: dict[str, dict[str, Any]] = {
    "narrow": {"hidden_size": 256, "num_hidden_layers": 12, "intermediate_size": 768},
    "wide": {"hidden_size": 768, "num_hidden_layers": 4, "intermediate_size": 2048},
}
"""Shapes of Qwen2's kind: launches weigh in the first, arithmetic in the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration."""

    model: str
    method: str
    prompt: int
    completion: int
    rows: int
    micro_batch: int
    checkpointing: bool

    @property
    def workload(self) -> Workload:
        """The experiment."""
        return Workload(
            method=self.method,
            dtype="float32",
            prompts_per_step=self.rows // 4,
            num_generations=4,
            max_prompt_length=self.prompt,
            max_completion_length=self.completion,
        )

    @property
    def plan(self) -> Plan:
        """How it is run."""
        return Plan(
            micro_batch=self.micro_batch,
            gradient_accumulation_steps=self.rows // self.micro_batch,
            gradient_checkpointing=self.checkpointing,
            logprob_chunk_tokens=min(256, self.micro_batch * self.completion),
            rollout_batch=self.rows,
        )


def cases() -> list[Case]:
    """Return the twelve: lengths, batch shapes, checkpointing and method vary together."""
    shapes = (
        (32, 32, 8, 8, False, "full"),
        (32, 32, 8, 2, False, "full"),
        (96, 32, 8, 4, True, "full"),
        (32, 96, 4, 4, False, "lora"),
        (64, 16, 16, 4, False, "lora"),
        (64, 64, 8, 8, True, "lora"),
    )
    return [
        Case(
            model=model,
            method=method,
            prompt=prompt,
            completion=completion,
            rows=rows,
            micro_batch=micro_batch,
            checkpointing=checkpointing,
        )
        for model in MODELS
        for prompt, completion, rows, micro_batch, checkpointing, method in shapes
    ]


def config_of(model: str) -> Any:
    """Return the transformers config of a benchmark model."""
    config = {
        "model_type": "qwen2",
        "vocab_size": 8192,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        **MODELS[model],
    }
    check_config(config, model)
    return build_config(config)


def measure_update(
    case: Case, repeats: int, before: Callable[[], object] = lambda: None
) -> dict[Phase, float]:
    """Return the median seconds by phase of `repeats` updates, after one that warms up.

    `before` is called before each of them.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    workload, plan = case.workload, case.plan
    model = AutoModelForCausalLM.from_config(config_of(case.model), dtype=weights_dtype(workload))
    model = add_adapters(model, workload)
    prepare_policy(model, workload)
    set_checkpointing(model, enabled=plan.gradient_checkpointing)
    engine = ResidentEngine(
        model.parameters(), optimizer_row(workload.optimizer), learning_rate=1e-5
    )
    one_update(model, engine, workload, plan)
    updates = []
    for _ in range(repeats):
        before()
        updates.append(one_update(model, engine, workload, plan))
    return {phase: statistics.median(update[phase] for update in updates) for phase in updates[0]}


def one_update(
    model: Any, engine: ResidentEngine, workload: Workload, plan: Plan
) -> dict[Phase, float]:
    """Return the seconds by phase of one update on random tokens, every row at its caps."""
    seconds = dict.fromkeys((Phase.ROLLOUT, Phase.FORWARD, Phase.BACKWARD, Phase.STEP), 0.0)
    sampling = Sampling(workload=workload, eos_ids=(), pad_id=0)
    prompts = [list(range(1, workload.max_prompt_length + 1))] * plan.rollout_batch
    model.eval()
    noise = torch.rand(plan.rollout_batch, workload.max_completion_length)
    started_s = time.perf_counter()
    for _ in range(workload.num_rows // plan.rollout_batch):
        generate_slice(model, prompts, noise, sampling)
    seconds[Phase.ROLLOUT] = time.perf_counter() - started_s
    model.train()
    policy = make_policy(model, workload, pad_id=0)
    begin_gradients(policy)
    micro, data = inputs(workload, plan)
    for _ in range(plan.gradient_accumulation_steps):
        started_s = time.perf_counter()
        share = micro_batch_loss(policy, micro, data, plan.logprob_chunk_tokens)
        between_s = time.perf_counter()
        share.loss.backward()
        seconds[Phase.FORWARD] += between_s - started_s
        seconds[Phase.BACKWARD] += time.perf_counter() - between_s
        del share
    started_s = time.perf_counter()
    engine.step()
    seconds[Phase.STEP] = time.perf_counter() - started_s
    for parameter in engine.parameters:
        parameter.grad = None
    gc.collect()
    return seconds


def inputs(workload: Workload, plan: Plan) -> tuple[MicroBatch, UpdateData]:
    """Return one micro-batch of random tokens, and the update that it stands for."""
    rows, completion = plan.micro_batch, workload.max_completion_length
    starts = torch.arange(rows)[:, None] * workload.num_tokens + workload.max_prompt_length - 1
    micro = MicroBatch(
        rows=tuple(range(rows)),
        input_ids=torch.randint(1, 8192, (rows, workload.num_tokens)),
        positions=(starts + torch.arange(completion)).reshape(-1),
        targets=torch.randint(1, 8192, (rows * completion,)),
        slots=torch.arange(rows * completion),
        mask=torch.ones(rows, completion),
    )
    data = UpdateData(
        batch=RolloutBatch(prompt_ids=(), completion_ids=(), truncated=()),
        advantages_R=torch.randn(workload.num_rows),
        mask_RC=torch.ones(workload.num_rows, completion, dtype=torch.bool),
        normalizers=Normalizers(
            num_rows=workload.num_rows, num_loss_tokens=workload.num_rows * completion
        ),
        rows=tuple(range(workload.num_rows)),
        old_logprobs_RC=None,
        ref_logprobs_RC=None,
    )
    return micro, data


def spearman(left: list[float], right: list[float]) -> float:
    """Return the rank correlation of two lists without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (left, right)]
    n = len(left)
    distance = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    return 1 - 6 * distance / (n * (n * n - 1))


def ladder(case: Case) -> Iterator[Case]:
    """Yield `case` under every micro-batch, with and without checkpointing."""
    for micro_batch in (1, 2, 4, 8):
        for checkpointing in (False, True):
            yield replace(case, micro_batch=micro_batch, checkpointing=checkpointing)


def cards_errors(file: Path) -> list[float]:
    """Return predicted over measured, minus 1, of every case in `file` that can be asked."""
    errors = []
    footprints: dict[tuple[str, str], Footprint] = {}
    for case in json.loads(file.read_text(encoding="utf-8")):
        if not askable(case):
            continue
        method = case["method"].partition(";")[0]
        workload = Workload(
            method=method,
            lora_rank=case.get("lora", {}).get("r", 16),
            prompts_per_step=case["batch"],
            num_generations=2,
            max_prompt_length=1,
            max_completion_length=case["seq_len"] - 1,
        )
        source = resolve_model(case["model_shape_id"])
        key = (source.name, f"{method} {workload.lora_rank}")
        if key not in footprints:
            footprints[key] = trace_footprint(source.name, build_config(source.config), workload)
        plan = Plan(
            micro_batch=case["batch"],
            gradient_accumulation_steps=2,  # unused: seconds of one micro-batch are taken
            gradient_checkpointing=bool(case["grad_ckpt"]),
            logprob_chunk_tokens=case["batch"] * (case["seq_len"] - 1),
            rollout_batch=1,
        )
        profile = load_profile(case["card_id"])
        if "fp16" in case["dtype"]:  # the trace's 16-bit work, at the card's rate for it
            rates = {**profile.flops_per_s, "bfloat16": profile.flops_per_s["float16"]}
            profile = replace(profile, flops_per_s=rates)
        speed = estimate_speed(footprints[key], workload, plan, profile)
        by_phase = {part.phase: part.seconds for part in speed.phases}
        halves_s = (by_phase[Phase.FORWARD] + by_phase[Phase.BACKWARD]) / 2
        predicted_s = halves_s * (case.get("grad_accum") or 1) + by_phase[Phase.STEP]
        errors.append(predicted_s / case["step_s"] - 1)
        print(
            f"{case['id']} on {case['card_id']}: {predicted_s:.2f} s predicted, "
            f"{case['step_s']:.2f} s measured ({errors[-1]:+.0%})"
        )
    return errors


def askable(case: dict[str, Any]) -> bool:
    """Return whether the trace knows this case: full or LoRA, exact length, known model, card."""
    if not case.get("step_s") or case["seq_len_is"] != "exact":
        return False
    if case["method"].partition(";")[0] not in ("full", "lora") or "emb" in case["id"]:
        return False
    try:
        resolve_model(case["model_shape_id"])
        load_profile(case["card_id"])
    except UsageError:
        return False
    return True


class Predictor:
    """Predictions with footprints traced once for each model and method."""

    def __init__(self, figure_s: float) -> None:
        self.pace = Pace(figure_s=figure_s, clock=time.perf_counter, tell=lambda what: None)
        self.footprints: dict[tuple[str, str], Footprint] = {}

    def measure(self) -> CardProfile:
        """Return a profile with the rates that this machine has now."""
        cpu = torch.device("cpu")
        flops = measure_flops("float32", cpu, self.pace)
        return replace(
            virtual_profile("virtual:1GiB", 2**30),
            flops_per_s={"float32": flops},
            memory_bandwidth_bytes_per_s=measure_copy(cpu, self.pace),
            launch_s=measure_launch_s(cpu, self.pace),
        )

    def footprint(self, case: Case) -> Footprint:
        """Return what the trace learnt of the model of `case`."""
        key = (case.model, case.method)
        if key not in self.footprints:
            config = config_of(case.model)
            self.footprints[key] = trace_footprint(case.model, config, case.workload)
        return self.footprints[key]

    def predict(self, case: Case) -> SpeedEstimate:
        """Return the predicted seconds of `case`."""
        footprint = self.footprint(case)
        return estimate_speed(footprint, case.workload, case.plan, self.measure())


def main() -> None:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--cards", type=Path, metavar="FILE", help="step times of real cards")
    parser.add_argument("--only-cards", action="store_true", help="nothing of this machine")
    options = parser.parse_args()
    result: dict[str, float | None] = {}
    if options.cards is not None:
        errors = [abs(error) for error in cards_errors(options.cards)]
        result = {"cards_median_error": round(statistics.median(errors), 3), "cards": len(errors)}
    if not options.only_cards:
        result.update(this_machine(quick=options.quick))
    print(json.dumps(result))


def this_machine(*, quick: bool) -> dict[str, float | None]:
    """Return the figures of this machine's own profile."""
    repeats = 3 if quick else 7
    predictor = Predictor(figure_s=0.15 if quick else 0.5)
    predicted, measured = compare(cases(), predictor, repeats)
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    picked_over_best = pick(predictor, repeats)
    return {
        "median_error": round(statistics.median(errors), 3),
        "worst_error": round(max(errors), 3),
        "spearman": round(spearman(predicted, measured), 3),
        "picked_over_best": round(picked_over_best, 3),
    }


def compare(
    configurations: list[Case], predictor: Predictor, repeats: int
) -> tuple[list[float], list[float]]:
    """Return predicted and measured seconds of `configurations`, printed by phase."""
    predicted, measured = [], []
    for case in configurations:
        estimates, seconds = predict_and_measure(case, predictor, repeats)
        predicted.append(statistics.median(estimate.seconds for estimate in estimates))
        measured.append(sum(seconds.values()))
        parts = ", ".join(
            f"{part.phase} {part.seconds:.3f}/{seconds[part.phase]:.3f} {part.bound_by}"
            for part in sorted(estimates, key=lambda e: e.seconds)[len(estimates) // 2].phases
        )
        print(
            f"{case.model:6} {case.method:4} p{case.prompt} c{case.completion} "
            f"{case.micro_batch}x{case.rows // case.micro_batch}"
            f"{' ck' if case.checkpointing else ''}: {predicted[-1]:.2f} predicted, "
            f"{measured[-1]:.2f} s measured ({predicted[-1] / measured[-1] - 1:+.0%}); {parts}"
        )
    return predicted, measured


def predict_and_measure(
    case: Case, predictor: Predictor, repeats: int
) -> tuple[list[SpeedEstimate], dict[Phase, float]]:
    """Return a prediction just before each update, and the updates' median seconds by phase."""
    estimates: list[SpeedEstimate] = []
    seconds = measure_update(case, repeats, lambda: estimates.append(predictor.predict(case)))
    return estimates, seconds


def pick(predictor: Predictor, repeats: int) -> float:
    """Return the measured seconds of the plan predicted as fastest over the fastest measured."""
    question = cases()[0]
    plans = list(ladder(question))
    unlimited = Budget(card_bytes=2**60, total_bytes=2**60)
    profile = predictor.measure()

    def priced(case: Case) -> float:
        question = Question(footprint=predictor.footprint(case), profile=profile, budget=unlimited)
        return price(question, case.workload, case.plan).speed.seconds

    picked = min(plans, key=priced)
    seconds = {case: sum(measure_update(case, repeats).values()) for case in plans}
    return seconds[picked] / min(seconds.values())


if __name__ == "__main__":
    main()
