"""Steps of other trainers on fake tensors: what they hold, against real layers and by hand."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_lite.errors import UsageError
from grpo_lite.optimizers import optimizer_row
from grpo_lite.predict.allocator import replay
from grpo_lite.trace.build import build_config
from grpo_lite.trace.cuda_rules import (
    AttentionKernel,
    attention_kernel,
    cuda_autocast,
    cuda_kernels,
)
from grpo_lite.trace.quantised import quantise
from grpo_lite.trace.trainers import TrainerStep, record_step
from grpo_lite.units import MIB

peft_filter = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")

CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
LOGITS = 4 * 256 * 4096
"""Elements of the logits of the steps below."""


def log_of(**changes):
    fields = {"trainer": "sft", "method": "full", "rows": 4, "tokens": 256} | changes
    return record_step(build_config(CONFIG), TrainerStep(**fields))


def peak_of(log):
    return replay(log.loading, [log.first, log.later]).allocated_bytes


@pytest.mark.parametrize("double", [False, True])
def test_the_stand_in_holds_the_bytes_of_the_real_4bit_layer(double):
    """A wrong count of statistics is some percent of a large model."""
    bnb = pytest.importorskip("bitsandbytes")
    linear = torch.nn.Linear(96, 352, bias=False, dtype=torch.bfloat16)
    real = bnb.nn.Linear4bit(96, 352, bias=False, quant_type="nf4", compress_statistics=double)
    real.load_state_dict({"weight": linear.weight})
    real = real.to("cpu")
    if real.weight.quant_state is None:
        real.weight._quantize("cpu")
    state = real.weight.quant_state
    held = [real.weight, state.absmax, state.code]
    if double:
        held += [state.offset, state.state2.absmax, state.state2.code]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def get_output_embeddings(self):
            return None

    stand_in = quantise(Model(), compute_dtype=torch.bfloat16, double_quantised=double).linear
    tensors = [*stand_in.parameters(), *stand_in.buffers()]
    assert sorted(t.nbytes for t in tensors) == sorted(t.nbytes for t in held)


@peft_filter
def test_a_4bit_step_sees_the_dequantised_matrix_in_both_passes():
    """It is the largest temporary of QLoRA, and what many out-of-memory messages ask for."""
    log = log_of(method="qlora", lora_rank=4)
    wide = [size for name, size in log.tensors if name.endswith("dequantize_4bit")]
    assert wide.count(128 * 384 * 2) == 2 * 3 * 3


def test_holding_the_output_through_backward_costs_the_logits():
    """A loop that keeps `out` pays for it; taking one for the other misjudges every SFT step."""
    difference = peak_of(log_of(keeps_output=True)) - peak_of(log_of())
    assert difference == 2 * LOGITS


@peft_filter
@pytest.mark.filterwarnings("ignore::UserWarning")  # TRL's own
def test_trl_before_1_15_holds_all_logits_and_its_fused_head_does_not():
    """The same configuration differs by gibibytes between the two."""
    pytest.importorskip("trl", minversion="1.15")
    # Tiles of the head are 32768 wide: below that they are no smaller than the logits.
    shape = {"completion": 192, "autocast_dtype": "bfloat16", "rows": 64}
    full = peak_of(log_of(trainer="trl-full-logits", method="lora", **shape))
    fused = peak_of(log_of(trainer="trl", method="lora", **shape))
    assert full - fused > 8 * 64 * 192 * 4096


def test_states_appear_in_the_first_step_and_not_again():
    """They are made after the first backward: the first step fits where the second does not."""
    log = log_of(optimizer="adamw_torch_fused", cublas_workspace_bytes=MIB)
    states = sum(e.num_bytes for e in log.first) - sum(e.num_bytes for e in log.later)
    weights = sum(e.num_bytes for e in log.loading if e.num_bytes)
    assert states == pytest.approx(2 * weights + 2 * MIB, rel=0.01)


def test_the_workspaces_of_both_threads_lie_before_their_first_products():
    """Taken too early they would fill another hole, and reserved would come out smaller."""
    log = log_of(cublas_workspace_bytes=12345)
    places = [place for place, event in enumerate(log.first) if event.num_bytes == 12345]
    kinds = [log.tensors[log.first[place + 1].key][0] for place in places]
    assert len(places) == 2
    assert set(kinds) <= {"mm", "addmm", "bmm"}


def test_a_step_frees_all_that_it_makes():
    """What is left over would add up over the steps of a replay."""
    log = log_of(checkpointing=True)
    made = [event.key for event in log.later if event.num_bytes]
    freed = [event.key for event in log.later if not event.num_bytes]
    assert sorted(made) == sorted(freed)


def test_eager_attention_pays_for_the_product_in_the_softmax_backward():
    """CUDA makes grad x output there and the CPU does not: one more matrix of all scores."""
    with FakeTensorMode(), cuda_kernels("8.0"):
        x = torch.empty(2, 8, 8, dtype=torch.bfloat16, requires_grad=True)
        out = torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32)
        (grad,) = torch.autograd.grad(out.sum(), x)
    assert (out.dtype, grad.dtype) == (torch.float32, torch.bfloat16)
    scores = 16 * 4 * 256 * 256
    eager = [size for _, size in log_of(attention="eager").tensors]
    fused = [size for _, size in log_of(attention="sdpa").tensors]
    assert scores in eager
    assert scores not in fused


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        ("7.5", torch.float16, AttentionKernel.EFFICIENT),
        ("8.6", torch.bfloat16, AttentionKernel.FLASH),
        ("9.0", torch.float32, AttentionKernel.EFFICIENT),
    ],
)
def test_the_attention_kernel_follows_card_and_dtype(capability, dtype, kernel):
    """Flash on a T4, or in fp32, would hide the memory-efficient kernel's copies."""
    assert attention_kernel(capability, dtype) is kernel


def test_autocast_widens_what_cuda_widens_and_narrows_the_products():
    """The CPU's autocast leaves log_softmax narrow: gibibytes of logits would be missed."""
    x = torch.zeros(2, 4, requires_grad=True)
    with cuda_autocast(torch.bfloat16):
        product = x @ x.t()
        assert product.dtype == torch.bfloat16
        assert torch.nn.functional.log_softmax(product, dim=-1).dtype == torch.float32
        assert product.softmax(-1).dtype == torch.float32
        assert (product * 2).dtype == torch.bfloat16


def test_8bit_states_are_an_eighth_above_a_size_and_wide_below_it():
    """Small tensors stay fp32 in bitsandbytes, and paged ones leave torch's allocator."""
    row = optimizer_row("adamw_bnb_8bit")
    assert row.state_tensor_bytes(4095, 4) == (4 * 4095,) * 2
    assert row.state_tensor_bytes(4096, 4) == (4096, 4096, 64, 64)
    paged = optimizer_row("paged_adamw_8bit")
    assert paged.state_tensor_bytes(100_000, 4) == ()
    assert paged.state_tensor_bytes(99_999, 4) == (99_999, 99_999, 1564, 1564)


def test_an_unknown_trainer_is_refused_by_name():
    """A guess in its place would answer for another step."""
    with pytest.raises(UsageError, match="verl"):
        TrainerStep(trainer="verl", method="full", rows=1, tokens=8)
