"""Measuring a machine: honest spreads, a file that reads back, and cures for what can go wrong."""

import itertools
import time
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_lite.cards import measure
from grpo_lite.cards.measure import Pace, measure_cpu, measure_flops, settled
from grpo_lite.cards.measure_cuda import driver_view, profile_name
from grpo_lite.cards.probe import open_card, plan_card
from grpo_lite.cards.profile import (
    load_profile,
    match_profile,
    parse_profile,
    profile_to_toml,
    save_profile,
)
from grpo_lite.commands.main import main
from grpo_lite.errors import StoreError, UsageError
from grpo_lite.units import MIB


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The user's configuration folder, empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "grpo-lite" / "cards"


@pytest.fixture
def small(monkeypatch):
    """Blocks and copies that take no time."""
    make_small(monkeypatch)


def make_small(monkeypatch):
    monkeypatch.setattr(measure, "DISK_BLOCK_BYTES", MIB)
    monkeypatch.setattr(measure, "COPY_BYTES", MIB)
    monkeypatch.setattr(measure, "NUM_BLOCKS", 2)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """The folder in which the module's one profile measured the disk."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def cpu(scratch):
    """This machine's processor, measured once: half precision is slow on most."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(monkeypatch)
        return measure_cpu(scratch, pace_of())


def pace_of(figure_s=0.001, step_s=None):
    """A pace whose clock moves on by `step_s` at each look, or tells the time."""
    ticks = itertools.count()
    clock = time.perf_counter if step_s is None else lambda: next(ticks) * step_s
    return Pace(figure_s=figure_s, clock=clock, tell=lambda what: None)


def test_the_processors_profile_is_measured_and_reads_back(config, cpu, scratch):
    save_profile(cpu)
    assert load_profile("cpu") == cpu
    figures = [cpu.memory_bandwidth_bytes_per_s, cpu.launch_s, cpu.disk_read_bytes_per_s]
    for figure in [*figures, *cpu.flops_per_s.values()]:
        assert figure.source == "measured"
        assert figure.low <= figure.value <= figure.high
        assert figure.value > 0
    assert list(scratch.iterdir()) == []


def test_a_rate_is_the_work_over_the_clocks_seconds():
    """The danger: a factor of two or of the number of repetitions in a figure nobody rechecks."""
    figure = measure_flops("float32", torch.device("cpu"), pace_of(figure_s=3, step_s=1.0))
    assert figure.value == figure.low == figure.high == 2 * 8 * 1024 * 4096
    assert "[8, 1024] x [1024, 4096]" in figure.note


def test_the_cost_of_starting_is_divided_by_the_operations_that_a_block_really_starts():
    """A module changed without its count would be wrong by that factor in every prediction."""
    kernels = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view:
                kernels.append(func)
            return func(*args, **(kwargs or {}))

    block, number = measure._TinyBlock(), torch.ones(1, 8)
    with torch.no_grad(), Counter():
        block(number)
    assert len(kernels) == measure.OPERATIONS_OF_A_BLOCK


def test_a_rate_is_what_it_settles_at_and_not_the_first_second():
    """Laptops throttle: the mean of a fast start and a slow rest promises what never lasts."""
    figure = settled([100.0, 100.0, 50.0, 52.0, 51.0], "x")
    assert figure.value == 51.0
    assert (figure.low, figure.high) == (50.0, 100.0)


def test_a_folder_that_cannot_be_written_is_told_with_its_cure(small, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError) as caught:
        measure.measure_disk(file, pace_of())
    assert "--disk" in caught.value.hint


def test_a_full_disk_is_not_measured(small, tmp_path, monkeypatch):
    monkeypatch.setattr(measure.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert measure.measure_disk(tmp_path, pace_of()) == (None, None)


def test_a_shipped_profile_survives_being_written():
    profile = load_profile("rtx-3080-laptop-16gb")
    assert parse_profile(profile_to_toml(profile), f"{profile.name}.toml") == profile


def test_only_a_processor_may_lack_a_driver_name(cpu):
    """A card's file whose capability was edited away must not become a card without CUDA."""
    text = profile_to_toml(cpu)
    assert tomllib.loads(text)["form"] == "cpu"
    with pytest.raises(UsageError, match="nvml_name is missing"):
        parse_profile(text.replace('form = "cpu"', 'form = "laptop"'), "x.toml")


def test_a_profile_edited_wrongly_names_file_and_key(config, cpu, capsys):
    file = save_profile(cpu)
    file.write_text(file.read_text().replace('source = "measured"', 'source = "sworn"', 1))
    assert main(["profile", "--show", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "cpu.toml" in error
    assert "sworn" in error


def test_the_processor_is_a_card_that_plans_and_opens(config, cpu):
    with pytest.raises(UsageError):
        plan_card("cpu")  # not measured yet
    save_profile(cpu)
    planned = plan_card("cpu")
    assert open_card("cpu").budget_bytes == plan_card("cpu").budget.card_bytes
    assert 0 < planned.budget.card_bytes < planned.budget.total_bytes


def test_virtual_cards_take_the_measured_speeds_and_say_so(config, cpu):
    assert plan_card("virtual:1GiB").profile.flops_per_s["float32"].source == "assumed"
    save_profile(cpu)
    planned = plan_card("virtual:1GiB")
    assert planned.profile.flops_per_s == cpu.flops_per_s
    assert "measured" in planned.note


def test_a_processors_profile_is_never_matched_to_a_cuda_card(config, cpu):
    save_profile(replace(cpu, title="NVIDIA A10"))
    assert match_profile("NVIDIA A10", 23 * 1024**3).name != "cpu"


def test_the_command_writes_the_profile_and_shows_it(config, small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("grpo_lite.commands.profile.QUICK_FIGURE_S", 0.001)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["profile", "--quick", "--disk", str(tmp_path / "scratch")]) == 0
    streams = capsys.readouterr()
    assert "matrix products, float32" in streams.out
    assert "measuring memory bandwidth" in streams.err
    assert (config / "cpu.toml").is_file()
    assert main(["profile", "--list"]) == 0
    assert "rtx-3080-laptop-16gb" in capsys.readouterr().out


class FakeNvml:
    """NVML with one card; `fails` makes every call fail, as without a driver."""

    NVMLError = RuntimeError

    def __init__(self, *, fails=False):
        self.fails = fails

    def nvmlInit(self):  # noqa: N802  # NVML's own name
        if self.fails:
            raise self.NVMLError("no driver")

    def __getattr__(self, name):
        process = SimpleNamespace(pid=77, usedGpuMemory=300 * MIB)
        hidden = SimpleNamespace(pid=78, usedGpuMemory=None)  # WSL and WDDM do not tell
        answers = {
            "nvmlDeviceGetHandleByIndex": 0,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=8 * 1024**3, used=512 * MIB),
            "nvmlDeviceGetComputeRunningProcesses": [hidden],
            "nvmlDeviceGetGraphicsRunningProcesses": [process],
            "nvmlDeviceGetEnforcedPowerLimit": 115_000,
        }
        return lambda *arguments: answers[name]


def test_the_driver_tells_who_holds_the_card():
    view = driver_view(FakeNvml())
    assert view.used_bytes == 512 * MIB
    assert view.power_limit_w == 115
    assert view.holders == ("process 77 300 MiB",)


def test_no_driver_is_no_error():
    assert driver_view(FakeNvml(fails=True)).used_bytes is None


@pytest.mark.parametrize(
    ("device", "total", "name"),
    [
        ("NVIDIA GeForce RTX 9000 Laptop GPU", 32 * 2**30, "rtx-9000-laptop-gpu-32gb"),
        ("NVIDIA H200", int(139.8 * 2**30), "h200-140gb"),
    ],
)
def test_a_card_without_a_profile_gets_a_file_name(device, total, name):
    assert profile_name(device, total) == name
