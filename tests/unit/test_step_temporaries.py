"""What the optimizer's kernels copy in STEP, by optimizer."""

import pytest

from grpo_lite.optimizers import BLOCK_BYTES
from grpo_lite.plan import Category, Workload
from grpo_lite.predict.footprint import Footprint, Weights
from grpo_lite.predict.memory import Standing, estimate_step


def step_of(optimizer, *, gradient_bytes, largest_bytes, offload="none"):
    weights = Weights(
        num_parameters=gradient_bytes // 4,
        num_trainable=gradient_bytes // 4,
        num_trainable_tensors=10,
        parameter_bytes=gradient_bytes,
        gradient_bytes=gradient_bytes,
        largest_gradient_bytes=largest_bytes,
    )
    footprint = Footprint(
        model="m", weights=weights, terms=(), stages={}, num_layers=1, traced_layers=1, versions={}
    )
    standing = Standing(
        footprint=footprint, workload=Workload(optimizer=optimizer), offload=offload
    )
    return estimate_step(standing)


@pytest.mark.parametrize(
    ("gradient_bytes", "largest_bytes", "copied"),
    [
        (8 * BLOCK_BYTES, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES),
        (8 * BLOCK_BYTES, 64, BLOCK_BYTES),
        (4096, 64, 4096),
    ],
)
def test_foreach_kernels_copy_a_block_of_second_moments(gradient_bytes, largest_bytes, copied):
    """Left out, a step that dies in the optimizer would be called a fit."""
    sizes = {"gradient_bytes": gradient_bytes, "largest_bytes": largest_bytes}
    foreach, fused = (step_of(name, **sizes) for name in ("adamw_torch", "adamw_torch_fused"))
    assert foreach.allocated_bytes - fused.allocated_bytes == copied
    assert foreach.by_category[Category.TEMPORARY] == copied
    assert Category.TEMPORARY not in fused.by_category


def test_8bit_states_take_a_quarter_and_paged_ones_next_to_nothing():
    """Their bytes decide what fits; counted as fp32 they would refuse good plans."""
    sizes = {"gradient_bytes": 4 * 2**20, "largest_bytes": 4096}
    states = {
        name: step_of(name, **sizes).by_category[Category.OPTIMIZER_STATE]
        for name in ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit")
    }
    assert states["adamw_torch_fused"] == pytest.approx(8 * 2**20, rel=1e-4)
    assert states["adamw_bnb_8bit"] == pytest.approx(2.03125 * 2**20, rel=1e-4)
    assert states["paged_adamw_8bit"] < 4096


def test_offloaded_gradients_are_stepped_elsewhere():
    """The temporaries are the card's only where the step is."""
    sizes = {"gradient_bytes": 4096, "largest_bytes": 64}
    step = step_of("adamw_torch", offload="ram", **sizes)
    assert Category.TEMPORARY not in step.by_category
