"""The chunked head against its dense twin: values and gradients, for any chunk."""

import pytest
import torch
from dense_twins import dense_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lite.errors import UsageError
from grpo_lite.grpo.logprobs import HeadWeights, chunked_logprobs

TEMPERATURE = 0.7


def make_case(*, tokens=7, hidden=6, vocab=13, dtype=torch.float64, seed=0, bias=True, **transform):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    head = HeadWeights(
        weight_VH=leaf(vocab, hidden), bias_V=leaf(vocab) if bias else None, **transform
    )
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, generator=generator).to(
        torch.promote_types(dtype, torch.float32)
    )
    return leaf(tokens, hidden), head, targets, weights


def leaves(hidden, head):
    return [leaf for leaf in (hidden, head.weight_VH, head.bias_V) if leaf is not None]


def loss_of(scores, weights, *, entropy=True):
    logprobs, entropies = scores
    loss = (logprobs * weights[0]).sum()
    return loss + (entropies * weights[1]).sum() if entropy else loss


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs)


def relative_error(ours, wanted):
    return (
        (ours.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    ).item()


transforms = st.fixed_dictionaries(
    {
        "softcap": st.sampled_from([None, 1.5, 30.0]),
        "scale": st.sampled_from([1.0, 0.125, 3.0]),
        "bias": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    transform=transforms,
    tokens=st.integers(1, 12),
    chunk=st.integers(1, 15),
    entropy=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_chunk_gives_the_dense_values_and_gradients(transform, tokens, chunk, entropy, seed):
    """A chunk's edge or a short last chunk must not show in the numbers (fp64: nearly exact)."""
    hidden, head, targets, weights = make_case(tokens=tokens, seed=seed, **transform)
    ours = chunked_logprobs(
        hidden, head, targets, temperature=TEMPERATURE, chunk_tokens=chunk, with_entropy=True
    )
    dense = dense_logprobs(hidden, head, targets, temperature=TEMPERATURE)
    torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)
    inputs = leaves(hidden, head)
    torch.testing.assert_close(
        gradients(loss_of(ours, weights, entropy=entropy), inputs),
        gradients(loss_of(dense, weights, entropy=entropy), inputs),
        rtol=1e-10,
        atol=1e-11,
    )


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_fp32_is_as_near_to_the_truth_as_a_millionth(softcap, entropy):
    """Rounding must not grow with vocabulary or chunks; the truth is the dense twin in fp64."""
    hidden, head, targets, weights = make_case(
        tokens=50, hidden=64, vocab=5000, dtype=torch.float32, bias=True, softcap=softcap, scale=0.3
    )
    ours = chunked_logprobs(
        hidden, head, targets, temperature=TEMPERATURE, chunk_tokens=16, with_entropy=True
    )
    got = gradients(loss_of(ours, weights, entropy=entropy), leaves(hidden, head))
    truth_hidden, truth_head = in_double(hidden, head)
    truth = dense_logprobs(truth_hidden, truth_head, targets, temperature=TEMPERATURE)
    wanted = gradients(
        loss_of(truth, weights.double(), entropy=entropy), leaves(truth_hidden, truth_head)
    )
    assert relative_error(ours[0], truth[0]) < 1e-6
    assert relative_error(ours[1], truth[1]) < 1e-6
    for gradient, exact in zip(got, wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, exact) < 1e-6


def in_double(hidden, head):
    def leaf(tensor):
        return None if tensor is None else tensor.detach().double().requires_grad_()

    return leaf(hidden), HeadWeights(
        weight_VH=leaf(head.weight_VH),
        bias_V=leaf(head.bias_V),
        softcap=head.softcap,
        scale=head.scale,
    )


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_bf16_errs_hardly_more_than_the_dense_bf16_path(softcap):
    """Being cut must not cost digits, but for one rounding of the weight's gradient.

    Each chunk's product for the weight is rounded to bf16 before it is added in fp32, and the sum
    is rounded to the weight's bf16 at the end: at most twice the squared error of one rounding.
    One case alone is noise (0.7 to 1.4 of the dense error), so errors are squared and summed over
    ten.
    """
    cut, whole, dense = (torch.zeros(5, dtype=torch.float64) for _ in range(3))
    for seed in range(10):
        hidden, head, targets, weights = make_case(
            tokens=60,
            hidden=64,
            vocab=2000,
            dtype=torch.bfloat16,
            softcap=softcap,
            scale=0.3,
            seed=seed,
        )
        truth_hidden, truth_head = in_double(hidden, head)
        truth = dense_logprobs(truth_hidden, truth_head, targets, temperature=TEMPERATURE)
        exact = gradients(loss_of(truth, weights.double()), leaves(truth_hidden, truth_head))
        wanted = (*truth, *exact)
        cut += squared_errors(bf16_scores(hidden, head, targets, 7), weights, hidden, head, wanted)
        whole += squared_errors(
            bf16_scores(hidden, head, targets, 60), weights, hidden, head, wanted
        )
        scores = dense_logprobs(hidden, head, targets, temperature=TEMPERATURE)
        dense += squared_errors(scores, weights, hidden, head, wanted)
    allowed = torch.tensor(
        [1.15, 1.15, 1.15, 2.0, 1.15]
    )  # logprobs, entropies, hidden, weight, bias
    assert (cut < allowed * whole).all()
    assert (cut < allowed * dense).all()
    assert (cut / 10 < 2**-12).all()


def bf16_scores(hidden, head, targets, chunk):
    scores = chunked_logprobs(
        hidden, head, targets, temperature=TEMPERATURE, chunk_tokens=chunk, with_entropy=True
    )
    assert [score.dtype for score in scores] == [torch.float32, torch.float32]
    return scores


def squared_errors(scores, weights, hidden, head, wanted):
    got = (*scores, *gradients(loss_of(scores, weights), leaves(hidden, head)))
    pairs = zip(got, wanted, strict=True)
    return torch.tensor([relative_error(ours, exact) ** 2 for ours, exact in pairs])


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_agree_with_finite_differences(softcap):
    """The twin could share a mistake of the formula; finite differences cannot."""
    hidden, head, targets, _ = make_case(tokens=4, vocab=5, softcap=softcap, scale=0.8)

    def scores(hidden, weight, bias):
        same = HeadWeights(weight_VH=weight, bias_V=bias, softcap=softcap, scale=0.8)
        return chunked_logprobs(
            hidden, same, targets, temperature=TEMPERATURE, chunk_tokens=3, with_entropy=True
        )

    assert torch.autograd.gradcheck(scores, (hidden, head.weight_VH, head.bias_V))


def test_slabs_of_the_vocabulary_add_up_to_the_whole_gradient():
    """bf16 adds the weight's gradient slab by slab: a lost or doubled slab is a silent error."""
    hidden, head, targets, weights = make_case(
        tokens=6, hidden=600, vocab=9000, dtype=torch.bfloat16, bias=False, scale=0.04
    )
    scores = chunked_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=6)
    got = gradients(loss_of(scores, weights, entropy=False), [head.weight_VH])[0]
    exact_hidden, exact_head = in_double(hidden, head)
    dense = dense_logprobs(exact_hidden, exact_head, targets, temperature=1.0)
    wanted = gradients(loss_of(dense, weights.double(), entropy=False), [exact_head.weight_VH])[0]
    for start in range(0, 9000, 1000):
        part = slice(start, start + 1000)
        assert relative_error(got[part], wanted[part]) < 0.02


def test_a_nearly_certain_token_keeps_its_digits():
    """A peaked row's log-probability is about -1e-9; target - logsumexp could give 2e-6 above 0."""
    head = HeadWeights(weight_VH=torch.tensor([[20.0], [0.0]]))
    logprobs, entropies = chunked_logprobs(
        torch.ones(1, 1),
        head,
        torch.tensor([0]),
        temperature=1.0,
        chunk_tokens=1,
        with_entropy=True,
    )
    assert logprobs.item() == pytest.approx(0.0, abs=1e-7)
    other, _ = chunked_logprobs(
        torch.ones(1, 1), head, torch.tensor([1]), temperature=1.0, chunk_tokens=1
    )
    assert other.item() == pytest.approx(-20.0, rel=1e-6)
    assert entropies.item() == pytest.approx(21 * 2.0611536e-9, abs=5e-9)


def test_huge_logits_give_no_nan():
    """exp of an unshifted logit of 1e4 is inf, and inf - inf is NaN in every weight."""
    hidden = (torch.tensor([[1e4], [-1e4]])).requires_grad_()
    head = HeadWeights(weight_VH=torch.tensor([[1.0], [0.5], [-1.0]]).requires_grad_())
    scores = chunked_logprobs(
        hidden, head, torch.tensor([2, 0]), temperature=1.0, chunk_tokens=1, with_entropy=True
    )
    assert torch.isfinite(torch.stack(scores)).all()
    for gradient in gradients(scores[0].sum() + scores[1].sum(), [hidden, head.weight_VH]):
        assert torch.isfinite(gradient).all()


def test_no_tokens_give_empty_scores_and_zero_gradients():
    """A micro-batch of which every completion is masked must still run backward."""
    hidden, head, targets, _ = make_case(tokens=0)
    logprobs, entropies = chunked_logprobs(
        hidden, head, targets, temperature=1.0, chunk_tokens=4, with_entropy=True
    )
    assert logprobs.shape == entropies.shape == (0,)
    for gradient in gradients(logprobs.sum(), leaves(hidden, head)):
        assert not gradient.any()


@pytest.mark.parametrize(("temperature", "chunk_tokens"), [(0.0, 4), (-1.0, 4), (1.0, 0)])
def test_a_division_by_zero_or_an_endless_loop_is_refused(temperature, chunk_tokens):
    hidden, head, targets, _ = make_case()
    with pytest.raises(UsageError, match=f"chunk_tokens {chunk_tokens}"):
        chunked_logprobs(hidden, head, targets, temperature=temperature, chunk_tokens=chunk_tokens)
