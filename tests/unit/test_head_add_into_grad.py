"""Adding to the weight's own gradient in place: same numbers, one [V, H] less, hooks as ever."""

import pytest
import torch

from grpo_lite.cards.ledger import StorageLedger
from grpo_lite.grpo.logprobs import HeadWeights, chunked_logprobs

HIDDEN, VOCAB, TOKENS = 32, 600, 10


def accumulate(weight, *, into, tied, num_micro_batches=3, embed=None):
    """Run micro-batches over `weight`; tied: the embedding is the same matrix."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(num_micro_batches):
        ids = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
        table = weight if tied else embed
        hidden = torch.nn.functional.embedding(ids, table).tanh()
        head = HeadWeights(weight_VH=weight, add_into_grad=into)
        logprobs, _ = chunked_logprobs(hidden, head, ids.roll(-1), temperature=1.0, chunk_tokens=4)
        logprobs.sum().backward()


def make_weight(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    return weight.requires_grad_()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_over_micro_batches_is_that_of_autograd(tied, dtype):
    """A part added twice, or lost with the tied embedding's, would pass every one-step test."""
    grads = []
    for into in (False, True):
        weight, embed = make_weight(dtype), make_weight(dtype)
        accumulate(weight, into=into, tied=tied, embed=embed)
        grads.append(weight.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-6)


def test_the_gradient_keeps_its_memory():
    """Others hold a view of `.grad` (blocks, clipping): it must be added to, not replaced."""
    weight = make_weight()
    accumulate(weight, into=True, tied=True, num_micro_batches=1)
    address, before = weight.grad.data_ptr(), weight.grad.clone()
    accumulate(weight, into=True, tied=True, num_micro_batches=1)
    assert weight.grad.data_ptr() == address
    torch.testing.assert_close(weight.grad, 2 * before, rtol=1e-5, atol=1e-6)


def test_no_second_gradient_matrix_is_alive():
    """With accumulation autograd holds `.grad` and the new gradient beside it: [V, H] fp32 more."""
    peaks = []
    for into in (False, True):
        weight, embed = make_weight(), make_weight().detach()
        accumulate(weight, into=into, tied=False, embed=embed, num_micro_batches=1)
        ledger = StorageLedger()
        for tensor in (weight, weight.grad, embed):
            ledger.admit(tensor)
        before = ledger.allocated_bytes
        with ledger.attach():
            accumulate(weight, into=into, tied=False, embed=embed, num_micro_batches=1)
        peaks.append(ledger.peak_bytes - before)
    assert peaks[0] - peaks[1] == pytest.approx(4 * VOCAB * HIDDEN, rel=0.02)
    assert peaks[1] < 4 * VOCAB * HIDDEN


@pytest.mark.parametrize("tied", [False, True])
def test_post_accumulate_hooks_run_once_a_backward_with_the_whole_sum(tied):
    """Who moves gradients in hooks would wait forever for one that autograd never sees."""
    weight, embed = make_weight(), make_weight().detach()
    seen = []
    weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    accumulate(weight, into=True, tied=tied, embed=embed)
    assert len(seen) == 3
    torch.testing.assert_close(seen[-1], weight.grad, rtol=0, atol=0)


def test_a_hook_that_takes_the_gradient_away_gets_every_part():
    """Offloading takes `.grad` and leaves None: then each micro-batch goes through autograd."""
    weight, embed = make_weight(), make_weight().detach()
    taken = torch.zeros_like(weight)

    def take(leaf):
        taken.add_(leaf.grad)
        leaf.grad = None

    weight.register_post_accumulate_grad_hook(take)
    accumulate(weight, into=True, tied=False, embed=embed)
    plain = make_weight()
    accumulate(plain, into=False, tied=False, embed=embed)
    torch.testing.assert_close(taken, plain.grad, rtol=1e-5, atol=1e-6)


def test_a_narrow_gradient_is_left_to_autograd():
    """Adding in place to a bf16 `.grad` would round each chunk's part away."""
    grads = []
    for into in (False, True):
        weight, embed = make_weight(torch.bfloat16), make_weight(torch.bfloat16).detach()
        accumulate(weight, into=into, tied=False, embed=embed)
        grads.append(weight.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=0)
