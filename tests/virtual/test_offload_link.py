"""The CUDA link's slots and threads, on a stand-in for CUDA whose copies are late."""

import contextlib
import threading
import time

import pytest
import torch

from grpo_lite.offload import link as link_module
from grpo_lite.offload.link import NUM_SLOTS, CudaLink
from grpo_lite.offload.memory import HostMemory


class FakeCuda:
    """Streams that do nothing, events that are waited for; copies happen when they are issued."""

    class Stream:
        def __init__(self, device=None):
            self.waited = []

        def wait_stream(self, other):
            self.waited.append(other)

        def wait_event(self, event):
            self.waited.append(event)

        def synchronize(self):
            pass

    class Event:
        def record(self, stream):
            self.stream = stream

        def synchronize(self):
            time.sleep(0.0001)

    def __init__(self):
        self.current = self.Stream()

    def current_stream(self, device):
        return self.current

    def stream(self, stream):
        return contextlib.nullcontext()


@pytest.fixture
def small_slots(monkeypatch):
    monkeypatch.setattr(link_module, "SLOT_BYTES", 64)


def make_link(in_flight_bytes=10_000):
    return CudaLink(
        torch.device("cpu"), HostMemory(), in_flight_bytes=in_flight_bytes, cuda=FakeCuda()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [1, 16, 31, 32, 33, 32 * NUM_SLOTS, 32 * NUM_SLOTS * 3 + 5])
def test_every_element_is_consumed_once_and_in_order(small_slots, dtype, length):
    """A slot that is used again too early hands over a later part twice."""
    link = make_link()
    sources = [torch.randn(length).to(dtype) for _ in range(3)]
    found = [[] for _ in sources]
    for source, into in zip(sources, found, strict=True):
        link.to_host(source, lambda part, start, into=into: into.append((start, part.clone())))
    link.drain()
    for source, into in zip(sources, found, strict=True):
        assert torch.equal(torch.cat([part for _, part in into]), source)
        assert [start for start, _ in into] == sorted({start for start, _ in into})
    link.close()


def test_weights_come_back_cast(small_slots):
    link = make_link()
    source = torch.randn(2000)
    target = torch.zeros(2000, dtype=torch.bfloat16)
    link.to_card(source, target)
    link.join()
    assert torch.equal(target, source.bfloat16())
    link.close()


def test_backward_waits_only_when_too_much_is_in_flight(small_slots):
    """Waiting for each copy leaves the card idle; never waiting fills it with gradients."""
    link = make_link(in_flight_bytes=300)
    gate = threading.Event()
    source = torch.ones(25)  # 100 bytes
    for _ in range(3):
        link.to_host(source, lambda part, start: gate.wait(5))
    fourth = threading.Thread(target=link.to_host, args=(source, lambda part, start: None))
    fourth.start()
    fourth.join(0.05)
    assert fourth.is_alive()
    gate.set()
    fourth.join(5)
    assert not fourth.is_alive()
    link.to_host(torch.ones(1000), lambda part, start: None)  # larger than the limit: goes alone
    link.drain()
    link.close()


def test_an_error_of_a_consumer_is_raised_at_drain_and_blocks_nothing(small_slots):
    link = make_link(in_flight_bytes=100)

    def failing(part, start):
        raise ValueError("no room")

    for _ in range(3):
        link.to_host(torch.ones(25), failing)
    with pytest.raises(ValueError, match="no room"):
        link.drain()
    link.drain()
    link.close()
