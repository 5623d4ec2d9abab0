"""The steps that are traced: the very functions that `train` runs, on fake inputs of given shapes.

Each returns a recording; what they record is turned into a footprint by `unroll`.
"""

from __future__ import annotations

import torch

from grpo_lite.grpo import rollout
from grpo_lite.grpo.batch import MicroBatch, RolloutBatch
from grpo_lite.grpo.objective import Normalizers
from grpo_lite.grpo.policy import autocast, set_checkpointing
from grpo_lite.grpo.update import (
    Policy,
    UpdateData,
    begin_gradients,
    make_policy,
    micro_batch_logprobs,
    micro_batch_loss,
)
from grpo_lite.plan import Workload
from grpo_lite.predict.footprint import Shape
from grpo_lite.trace.build import FakeModel, answer_data_questions
from grpo_lite.trace.recorder import IN_PLACE, Recorder, Recording, watch_layers


def record_rollout(
    fake: FakeModel,
    workload: Workload,
    shape: Shape,
    *,
    decode_tokens: int | None = None,
    counts_work: bool = True,
) -> Recording:
    """Record "prefill" of `shape.tokens` prompt tokens and one "decode" on the cache it leaves.

    `decode_tokens`: grow the cache to so many tokens in between, in a stage of its own.
    """
    recorder = Recorder(counts_work=counts_work)
    model = fake.model.eval()
    with (
        fake.mode,
        answer_data_questions(),
        recorder.record(fake.tensors),
        watch_layers(recorder, fake.layers, []),
        torch.no_grad(),
        autocast(workload, torch.device("cpu")),
    ):
        recorder.mark("prefill", "embedding")
        input_ids = torch.zeros(shape.rows, shape.tokens, dtype=torch.int64)
        length = shape.tokens if decode_tokens is None else decode_tokens
        mask = torch.ones(shape.rows, length + 1, dtype=torch.bool)
        noise = torch.rand(shape.rows)
        logits, state = rollout.prefill(model, input_ids, mask, rollout.make_cache(model))
        tokens = rollout.sample(logits, noise, workload.temperature)
        del logits
        recorder.note_kv_cache(_cache_tensors(state))
        if length != shape.tokens:
            recorder.mark("grow", "cache")
            _grow_cache(state, length)
        recorder.mark("decode", "embedding")
        logits = rollout.decode(model, tokens, state)
        rollout.sample(logits, noise, workload.temperature)
        recorder.note_kv_cache(_cache_tensors(state))
        recorder.mark("end", "end")
    return recorder.recording


def record_logprobs(fake: FakeModel, workload: Workload, shape: Shape) -> Recording:
    """Record "logprob": the scoring of a micro-batch of `shape` without gradient."""
    recorder = Recorder()
    set_checkpointing(fake.model, enabled=False)
    fake.model.train()
    with (
        fake.mode,
        answer_data_questions(),
        recorder.record(fake.tensors),
        watch_layers(recorder, fake.layers, []),
        torch.no_grad(),
    ):
        recorder.mark("logprob", "embedding")
        micro = _micro_batch(shape)
        micro_batch_logprobs(_policy(fake, workload), micro, shape.chunk)
        recorder.mark("end", "end")
    return recorder.recording


def record_micro_batch(
    fake: FakeModel,
    workload: Workload,
    shape: Shape,
    *,
    checkpointing: bool,
    counts_work: bool = True,
) -> Recording:
    """Record "forward" and "backward" of one micro-batch of `shape`; leaves no gradients."""
    recorder = Recorder(counts_work=counts_work)
    set_checkpointing(fake.model, enabled=checkpointing)
    fake.model.train()
    suffix = "/checkpointed" if checkpointing else ""
    with (
        fake.mode,
        answer_data_questions(),
        recorder.record(fake.tensors),
        watch_layers(recorder, fake.layers, fake.trainable),
    ):
        recorder.mark(f"forward{suffix}", "embedding")
        micro = _micro_batch(shape)
        data = _update_data(workload, shape)
        policy = _policy(fake, workload)
        begin_gradients(policy)
        if policy.head.weight_VH.grad is not None:
            recorder.note_gradient(policy.head.weight_VH, IN_PLACE)
        share = micro_batch_loss(policy, micro, data, shape.chunk)
        recorder.note_forward_end()
        recorder.mark(f"backward{suffix}", "head")
        share.loss.backward()
        recorder.mark("end", "end")
        del share, micro, data
        for parameter in fake.trainable:
            parameter.grad = None
    return recorder.recording


def _policy(fake: FakeModel, workload: Workload) -> Policy:
    return make_policy(fake.model, workload, pad_id=0)


def _micro_batch(shape: Shape) -> MicroBatch:
    """Return a micro-batch whose rows are all at the caps: the most that `shape` can hold."""
    scored = shape.rows * shape.completion
    return MicroBatch(
        rows=tuple(range(shape.rows)),
        input_ids=torch.zeros(shape.rows, shape.tokens, dtype=torch.int64),
        positions=torch.zeros(scored, dtype=torch.int64),
        targets=torch.zeros(scored, dtype=torch.int64),
        slots=torch.zeros(scored, dtype=torch.int64),
        mask=torch.ones(shape.rows, shape.completion),
    )


def _update_data(workload: Workload, shape: Shape) -> UpdateData:
    """Return the update of which the micro-batch is all, with the log-probs that its loss reads."""
    size = (shape.rows, shape.completion)
    return UpdateData(
        batch=RolloutBatch(prompt_ids=(), completion_ids=(), truncated=()),
        advantages_R=torch.ones(shape.rows),
        mask_RC=torch.ones(size, dtype=torch.bool),
        normalizers=Normalizers(num_rows=shape.rows, num_loss_tokens=shape.rows * shape.completion),
        rows=tuple(range(shape.rows)),
        old_logprobs_RC=torch.zeros(size) if workload.num_iterations > 1 else None,
        ref_logprobs_RC=torch.zeros(size) if workload.beta > 0 else None,
    )


def has_plain_cache(fake: FakeModel) -> bool:
    """Return whether each layer's cache is one key and one value tensor as long as the text."""
    from transformers.cache_utils import DynamicLayer

    layers = rollout.make_cache(fake.model).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def _grow_cache(state: rollout.DecodeState, length: int) -> None:
    """Put keys and values of `length` tokens in the place of those in the cache."""
    for layer in state.cache.layers:
        rows, heads, _, size = layer.keys.shape
        layer.keys = layer.keys.new_empty(rows, heads, length, size)
        layer.values = layer.values.new_empty(rows, heads, length, layer.values.shape[-1])
    state.length = length


def _cache_tensors(state: rollout.DecodeState) -> list[torch.Tensor]:
    return [tensor for layer in state.cache.layers for tensor in (layer.keys, layer.values)]
