"""A footprint of a shallow model against the full-depth run: the prediction's oracle.

`rehearse` is the slow twin: it runs every layer at the exact shapes and reads the ledger.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from grpo_lite.cards.virtual import VirtualCard
from grpo_lite.grpo.batch import RolloutBatch, make_micro_batch
from grpo_lite.grpo.objective import Normalizers
from grpo_lite.grpo.policy import add_adapters, prepare_policy, set_checkpointing, weights_dtype
from grpo_lite.grpo.rollout import Sampling, generate_slice, row_noise
from grpo_lite.grpo.update import UpdateData, accumulate_gradients, make_policy
from grpo_lite.offload.resident import ResidentEngine
from grpo_lite.optimizers import optimizer_row
from grpo_lite.plan import Phase, Plan, Workload
from grpo_lite.predict.footprint import (
    Footprint,
    Shape,
    footprint_from_json,
    footprint_to_json,
)
from grpo_lite.predict.memory import estimate_memory
from grpo_lite.trace.footprint import rehearse, trace_footprint
from grpo_lite.trace.formulas import NoFormula, Solver

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

WORKLOAD = Workload(
    dtype="float32",
    prompts_per_step=2,
    num_generations=4,
    max_prompt_length=20,
    max_completion_length=30,
    lora_rank=4,
)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def config_of(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    depth = {"gemma3_text": 26}.get(family, 7)
    kinds = {
        "llama": {},
        "qwen2": {"tie_word_embeddings": True},
        "gemma3_text": {"head_dim": 16},
    }[family]
    return CONFIG_MAPPING[family](num_hidden_layers=depth, **SMALL, **kinds)


@cache
def footprint_of(family: str, workload: Workload) -> Footprint:
    return trace_footprint(family, config_of(family), workload)


def plan_of(micro_batch: int, *, checkpointing: bool, chunk: int, offload: str = "none") -> Plan:
    return Plan(
        micro_batch=micro_batch,
        gradient_accumulation_steps=8 // micro_batch,
        gradient_checkpointing=checkpointing,
        logprob_chunk_tokens=chunk,
        rollout_batch=micro_batch,
        offload=offload,
    )


PLANS = [
    plan_of(8, checkpointing=True, chunk=240),
    plan_of(4, checkpointing=False, chunk=40),
    plan_of(2, checkpointing=True, chunk=20, offload="host"),
]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_shallow_trace_predicts_the_full_depth_exactly(family: str, method: str) -> None:
    """Extrapolating over layers is where closed formulas drift; counting must not."""
    workload = replace(WORKLOAD, method=method, beta=0.04 if method == "lora" else 0.0)
    for plan in PLANS:
        rehearsal = rehearse(config_of(family), workload, plan)
        for phase in estimate_memory(footprint_of(family, workload), workload, plan).phases:
            expected = rehearsal.peak_bytes[phase.phase]
            assert phase.allocated_bytes == pytest.approx(expected, rel=1e-3), (plan, phase)


def test_layers_of_several_kinds_are_counted_by_kind() -> None:
    """Gemma 3 has five sliding layers to a full one, and they share two rotary tables."""
    plan = plan_of(4, checkpointing=True, chunk=40)
    rehearsal = rehearse(config_of("gemma3_text"), WORKLOAD, plan)
    for phase in estimate_memory(footprint_of("gemma3_text", WORKLOAD), WORKLOAD, plan).phases:
        expected = rehearsal.peak_bytes[phase.phase]
        assert phase.allocated_bytes == pytest.approx(expected, rel=1e-3), phase


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_prediction_meets_a_real_run_in_every_phase(method: str, dtype: str) -> None:
    """Fake and real tensors could part ways in strides, kernels or autocast: they must not."""
    from transformers import AutoModelForCausalLM

    workload = replace(WORKLOAD, method=method, dtype=dtype)
    plan = plan_of(4, checkpointing=False, chunk=40)
    estimate = estimate_memory(footprint_of("qwen2", workload), workload, plan)
    torch.manual_seed(0)
    card = VirtualCard(2**40)
    peaks: dict[Phase, int] = {}
    with card.attach():
        model = AutoModelForCausalLM.from_config(config_of("qwen2"), dtype=weights_dtype(workload))
        model = add_adapters(model, workload)
        prepare_policy(model, workload)
        set_checkpointing(model, enabled=False)
        card.adopt([*model.parameters(), *model.buffers()])
        engine = ResidentEngine(
            model.parameters(), optimizer_row(workload.optimizer), learning_rate=1e-4
        )
        policy = make_policy(model, workload, pad_id=0)
        data = rollout_of(workload)
        current: list[Phase] = []

        def close() -> None:
            if current:
                phase = current.pop()
                peaks[phase] = max(peaks.get(phase, 0), card.peak_bytes())
            card.reset_peak()

        def watch(phase: Phase, shape: Shape) -> None:
            close()
            current.append(phase)

        for _ in range(2):  # the first step makes the optimizer's states
            peaks.clear()
            accumulate_gradients(policy, data, plan, watch)
            watch(Phase.STEP, Shape(rows=1, tokens=1))
            engine.step()
            engine.zero_grad()
            close()
        model.eval()
        watch(Phase.ROLLOUT, Shape(rows=4, tokens=20))
        sampling = Sampling(workload=workload, eos_ids=(-1,), pad_id=0)
        prompts = [[1] * 20, [1] * 19, [2] * 20, [3] * 20]  # one is padded, as most are
        generate_slice(model, prompts, row_noise(0, 0, range(4), 30), sampling)
        close()
    for phase, measured in peaks.items():
        predicted = estimate.of(phase)
        assert predicted is not None
        assert predicted.allocated_bytes == pytest.approx(measured, rel=0.01), phase


def rollout_of(workload: Workload) -> UpdateData:
    rows, cap = workload.num_rows, workload.max_completion_length
    batch = RolloutBatch(
        prompt_ids=((5,) * workload.max_prompt_length,) * rows,
        completion_ids=((7,) * cap,) * rows,
        truncated=(True,) * rows,
    )
    return UpdateData(
        batch=batch,
        advantages_R=torch.linspace(-1, 1, rows),
        mask_RC=torch.ones(rows, cap, dtype=torch.bool),
        normalizers=Normalizers(num_rows=rows, num_loss_tokens=rows * cap),
        rows=tuple(range(rows)),
    )


def test_micro_batches_pad_on_the_right_and_point_at_the_tokens_before() -> None:
    """A position off by one would train every token on its neighbour's prediction."""
    batch = RolloutBatch(
        prompt_ids=((1, 2), (3, 4, 5)),
        completion_ids=((6, 7), (8,)),
        truncated=(False, False),
    )
    micro = make_micro_batch(batch, [0, 1], pad_id=0, device=torch.device("cpu"))
    assert micro.input_ids.tolist() == [[1, 2, 6, 7], [3, 4, 5, 8]]
    assert micro.positions.tolist() == [1, 2, 6]
    assert micro.targets.tolist() == [6, 7, 8]
    assert micro.slots.tolist() == [0, 1, 2]
    assert micro.mask.tolist() == [[1, 1], [1, 0]]


def test_a_row_draws_the_same_noise_whatever_its_batch_mates() -> None:
    """Else a rollout that is sliced after an out-of-memory would be another experiment."""
    together = row_noise(3, 5, range(6), 4)
    alone = row_noise(3, 5, [4], 4)
    assert torch.equal(together[4:5], alone)
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(row_noise(3, 6, [4], 4), alone)


def test_more_of_anything_never_needs_fewer_bytes() -> None:
    footprint = footprint_of("llama", WORKLOAD)

    def peak(workload: Workload, plan: Plan) -> int:
        return estimate_memory(footprint, workload, plan).allocated_peak_bytes

    plan = plan_of(2, checkpointing=False, chunk=20)
    base = peak(WORKLOAD, plan)
    assert peak(replace(WORKLOAD, max_completion_length=31), plan) >= base
    assert peak(replace(WORKLOAD, max_prompt_length=21), plan) >= base
    wider = replace(plan, micro_batch=4, gradient_accumulation_steps=2, rollout_batch=4)
    assert peak(WORKLOAD, wider) >= base


def test_a_footprint_survives_the_cache_and_a_damaged_one_is_refused() -> None:
    footprint = footprint_of("llama", WORKLOAD)
    text = footprint_to_json(footprint)
    again = footprint_from_json(text)
    assert again == footprint
    assert estimate_memory(again, WORKLOAD, PLANS[0]) == estimate_memory(
        footprint, WORKLOAD, PLANS[0]
    )
    with pytest.raises(ValueError, match="damaged"):
        footprint_from_json(text.replace("rows", "rowz", 1))
    with pytest.raises(ValueError, match="damaged"):
        footprint_from_json("{}")


def test_formulas_are_found_exactly_or_not_at_all() -> None:
    """A size that is merely approximated is a constant fitted to three points."""
    shapes = [
        Shape(rows=101, tokens=307, completion=97, chunk=3907),
        Shape(rows=127, tokens=211, completion=113, chunk=5881),
        Shape(rows=149, tokens=401, completion=89, chunk=5167),
    ]
    solver = Solver(shapes)
    assert solver.solve([s.rows * s.tokens * 1536 for s in shapes]) == {(1, 1, 0, 0, 0): 1536}
    assert solver.solve([s.last * 512 for s in shapes]) == {(0, 0, 0, 0, 1): 512}
    assert solver.solve([(s.tokens + 1) * 8 for s in shapes]) == {
        (0, 0, 0, 0, 0): 8,
        (0, 1, 0, 0, 0): 8,
    }
    assert solver.words([s.rows * s.tokens for s in shapes]) == ("rows", "tokens")
    with pytest.raises(NoFormula):
        solver.solve([s.rows**3 + 17 * s.tokens for s in shapes])
