"""What a trace counts as work: kernels and the bytes that they move, and nothing else."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_lite.trace.recorder import Recorder


def work_of(act):
    """Return (flops, moved bytes) of each counted operation of `act`, run on fake tensors."""
    recorder = Recorder()
    with FakeTensorMode(), recorder.record([]):
        recorder.mark("stage", "part")
        act()
    return [work for segment in recorder.recording.segments for work in segment.work]


def test_a_product_counts_its_operations_and_its_three_tensors():
    """Two operations for each of 2 x 3 x 4 pairs; bytes of both factors and of the result."""

    def multiply():
        torch.ones(2, 3) @ torch.ones(3, 4)

    *_, product = work_of(multiply)
    assert product == (2 * 2 * 3 * 4, (24, 48, 32))


@pytest.mark.parametrize(
    "act",
    [
        lambda: torch.empty(8),
        lambda: torch.empty(8).device,
        lambda: torch.empty(8).detach(),
        lambda: torch.empty(8).view(2, 4).t(),
        lambda: torch.ops.aten._unsafe_view(torch.empty(8), [2, 4]),
    ],
    ids=["empty", "device", "detach", "view", "unsafe_view"],
)
def test_what_starts_no_kernel_is_no_work(act):
    """The danger: fake tensors ask for devices thousands of times a step, and each question once
    counted as an operation that reads its tensor."""
    assert work_of(act) == []


def test_questions_are_known_by_their_namespace():
    recorder = Recorder()
    recorder.mark("stage", "part")
    question = SimpleNamespace(is_view=False, namespace="prim", _overloadpacket=None)
    recorder.count_work(question, (torch.ones(4),), {}, None)
    assert recorder.recording.segments[-1].work == []
