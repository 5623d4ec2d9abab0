"""What the chunked head holds, and how it behaves inside autograd, autocast and fake tensors."""

import pytest
import torch
from dense_twins import dense_logprobs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from grpo_lite.cards.ledger import StorageLedger
from grpo_lite.grpo.logprobs import HeadWeights, chunked_logprobs

TOKENS, HIDDEN, VOCAB, CHUNK = 64, 8, 20000, 16


def make_case(dtype=torch.float32, *, weight_dtype=None, softcap=None, trained=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(weight_dtype or dtype)
    head = HeadWeights(weight_VH=weight.requires_grad_(trained), softcap=softcap)
    return hidden, head, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def peak_of(work, *existing):
    """Return what `work` returns and the most bytes alive in it beyond those of `existing`."""
    ledger = ledger_over(*existing)
    before = ledger.allocated_bytes
    with ledger.attach():
        result = work()
    return result, ledger.peak_bytes - before


def ledger_over(*existing):
    ledger = StorageLedger()
    for tensor in existing:
        ledger.admit(tensor)
    return ledger


def bytes_per_logit(num_bytes, tokens=CHUNK):
    return num_bytes / (tokens * VOCAB)


def score(hidden, head, targets, *, entropy=False, chunk=CHUNK):
    return chunked_logprobs(
        hidden, head, targets, temperature=0.9, chunk_tokens=chunk, with_entropy=entropy
    )


# Bytes per logit that the docstring promises: forward, backward.
PROMISES = {
    "fp32": (torch.float32, None, False, 4, 4),
    "bf16": (torch.bfloat16, None, False, 6, 6),
    "fp32 softcap": (torch.float32, 30.0, False, 4, 8),
    "bf16 softcap": (torch.bfloat16, 30.0, False, 6, 8),
    "fp32 entropy": (torch.float32, None, True, 4, 8),
    "bf16 entropy": (torch.bfloat16, None, True, 6, 8),
    "fp32 softcap entropy": (torch.float32, 30.0, True, 4, 12),
    "bf16 softcap entropy": (torch.bfloat16, 30.0, True, 6, 12),
}


@pytest.mark.parametrize("name", PROMISES)
def test_bytes_per_logit_are_those_of_the_docstring(name):
    """One forgotten temporary is a third more memory.

    The frozen head leaves only the chunk's logits and a few numbers per token to count.
    """
    dtype, softcap, entropy, forward_bytes, backward_bytes = PROMISES[name]
    hidden, head, targets = make_case(dtype, softcap=softcap, trained=False)
    scores, forward_peak = peak_of(
        lambda: score(hidden, head, targets, entropy=entropy), hidden, head.weight_VH
    )
    loss = sum(part.sum() for part in scores if part is not None)
    _, backward_peak = peak_of(loss.backward, hidden, head.weight_VH)
    assert bytes_per_logit(forward_peak) == pytest.approx(forward_bytes, rel=0.02)
    assert bytes_per_logit(backward_peak) == pytest.approx(backward_bytes, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trained_head_adds_one_fp32_gradient_and_its_cast(dtype):
    """[V, H] is the largest matrix of a small model: a second gradient of it may not fit."""
    hidden, head, targets = make_case(dtype)
    scores, _ = peak_of(lambda: score(hidden, head, targets), hidden, head.weight_VH)
    _, peak = peak_of(scores[0].sum().backward, hidden, head.weight_VH)
    gradient_bytes = 4 * VOCAB * HIDDEN
    logits_bytes = (4 if dtype == torch.float32 else 6) * CHUNK * VOCAB
    assert peak == pytest.approx(gradient_bytes + logits_bytes, rel=0.02)


def test_a_weight_of_another_dtype_is_copied_once_and_let_go():
    """bf16 autocast over fp32 weights: a copy per chunk, or one kept to backward, is waste."""
    hidden, head, targets = make_case(torch.bfloat16, weight_dtype=torch.float32, trained=False)
    _, one_chunk = peak_of(lambda: score(hidden, head, targets), hidden, head.weight_VH)
    narrow = HeadWeights(weight_VH=head.weight_VH.detach().bfloat16())
    _, plain = peak_of(lambda: score(hidden, narrow, targets), hidden, narrow.weight_VH)
    assert one_chunk - plain == 2 * VOCAB * HIDDEN
    ledger = ledger_over(hidden, head.weight_VH)
    before = ledger.allocated_bytes
    with ledger.attach():
        scores = score(hidden, head, targets)
    assert ledger.allocated_bytes - before < 4096
    assert scores[0].requires_grad


def test_memory_does_not_grow_with_the_number_of_tokens():
    """The point of chunks: logits of a chunk that outlive it would be right and useless."""
    hidden, head, targets = make_case(trained=False)
    _, whole = peak_of(lambda: score(hidden, head, targets), hidden, head.weight_VH)
    quarter = (hidden[:CHUNK], head, targets[:CHUNK])
    _, one = peak_of(lambda: score(*quarter), hidden, head.weight_VH)
    assert whole == pytest.approx(one, rel=0.01)


def test_without_grad_nothing_is_saved():
    """Old and reference log-probabilities are scored under no_grad, beside the rollout's memory."""
    hidden, head, targets = make_case()
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.no_grad():
        logprobs, entropies = score(hidden, head, targets, entropy=True)
    assert not saved
    assert not logprobs.requires_grad
    assert not entropies.requires_grad
    torch.testing.assert_close(logprobs, score(hidden, head, targets)[0].detach(), rtol=0, atol=0)


def test_autocast_computes_in_its_dtype_and_adds_in_fp32():
    """Backward runs with autocast off or on as the caller has it: it must not change a bit."""
    hidden, head, targets = make_case(torch.float32)
    explicit_hidden = hidden.detach().bfloat16().requires_grad_()
    explicit = score(explicit_hidden, head, targets)[0]
    wanted = torch.autograd.grad(explicit.sum(), [head.weight_VH])[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = score(hidden, head, targets)[0]
        inside_grads = torch.autograd.grad(inside.sum(), [hidden, head.weight_VH])
        outside = score(hidden, head, targets)[0]
    outside_grads = torch.autograd.grad(outside.sum(), [hidden, head.weight_VH])
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, explicit, rtol=0, atol=0)
    torch.testing.assert_close(inside_grads, outside_grads, rtol=0, atol=0)
    torch.testing.assert_close(inside_grads[1], wanted, rtol=0, atol=0)
    assert [grad.dtype for grad in inside_grads] == [torch.float32, torch.float32]


def test_backward_called_inside_autocast_keeps_the_forward_s_dtype():
    """fp32 scores whose gradient is computed in bf16 would be neither experiment."""
    hidden, head, targets = make_case(torch.float32)
    loss = score(hidden, head, targets)[0].sum()
    wanted = torch.autograd.grad(loss, [hidden, head.weight_VH], retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(loss, [hidden, head.weight_VH])
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_run_it_whole_with_a_short_last_chunk(dtype):
    """The predictor traces this code without data: a number read would stop it."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        hidden = torch.empty(7, 5, dtype=dtype, requires_grad=True)
        head = HeadWeights(
            weight_VH=torch.empty(11, 5, requires_grad=True), bias_V=torch.empty(11), softcap=3.0
        )
        logprobs, entropies = score(
            hidden, head, torch.empty(7, dtype=torch.int64), entropy=True, chunk=4
        )
        (logprobs.sum() + entropies.sum()).backward()
        assert hidden.grad.shape == hidden.shape
        assert head.weight_VH.grad.dtype == torch.float32


def test_fake_and_real_runs_hold_the_same_bytes():
    """A prediction is worth what its trace counts."""
    peaks = []
    for fake in (False, True):
        hidden, head, targets = make_case(torch.bfloat16, weight_dtype=torch.float32)
        if fake:
            mode = FakeTensorMode()
            hidden = mode.from_tensor(hidden.detach()).requires_grad_()
            weight = mode.from_tensor(head.weight_VH.detach()).requires_grad_()
            head, targets = HeadWeights(weight_VH=weight), mode.from_tensor(targets)
        scores, forward_peak = peak_of(lambda: score(hidden, head, targets), hidden, head.weight_VH)  # noqa: B023 (run here)
        _, backward_peak = peak_of(scores[0].sum().backward, hidden, head.weight_VH)
        peaks.append((forward_peak, backward_peak))
    assert peaks[0] == peaks[1]


def test_a_tied_embedding_gets_both_parts_of_its_gradient_once():
    """The same matrix is read as embedding and as head; adding one part twice trains on."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(17, 6, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.randint(0, 17, (9,), generator=generator)

    def loss(scorer):
        hidden = torch.nn.functional.embedding(ids, table).tanh()
        head = HeadWeights(weight_VH=table)
        return scorer(hidden, head, ids.roll(-1)).sum()

    ours = loss(lambda *args: score(*args, chunk=4)[0])
    dense = loss(lambda *args: dense_logprobs(*args, temperature=0.9)[0])
    torch.testing.assert_close(
        torch.autograd.grad(ours, table), torch.autograd.grad(dense, table), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_the_body_changes_nothing(use_reentrant):
    """Checkpointing runs the body's forward inside our backward's backward."""
    layer = torch.nn.Linear(HIDDEN, HIDDEN)
    hidden, head, targets = make_case()
    grads = []
    for body in (layer, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)):
        layer.zero_grad()
        score(body(hidden), head, targets)[0].sum().backward()
        grads.append(layer.weight.grad.clone())
    torch.testing.assert_close(*grads, rtol=0, atol=0)
