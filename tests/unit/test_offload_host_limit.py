"""RAM that may be had: the machine's, or less where a cgroup says so."""

import psutil
import pytest

from grpo_lite.offload.host_limit import available_host_bytes


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_cgroups_the_machine_decides(tmp_path):
    free = psutil.virtual_memory().available
    assert available_host_bytes(tmp_path) == pytest.approx(free, rel=0.2)


def test_a_version_2_cgroup_or_its_parent_limits(tmp_path):
    """Containers see the host's RAM in /proc/meminfo, and are killed at their own limit."""
    write(tmp_path / "proc/self/cgroup", "0::/user/session\n")
    group = tmp_path / "sys/fs/cgroup/user"
    write(group / "memory.max", "9000000\n")
    write(group / "memory.current", "3000000\n")
    write(group / "memory.stat", "anon 5\ninactive_file 1000000\n")
    write(group / "session/memory.max", "max\n")
    write(group / "session/memory.current", "1\n")
    assert available_host_bytes(tmp_path) == 7_000_000


def test_a_version_1_cgroup_limits(tmp_path):
    write(tmp_path / "proc/self/cgroup", "5:cpu:/x\n4:memory:/box\n")
    group = tmp_path / "sys/fs/cgroup/memory/box"
    write(group / "memory.limit_in_bytes", "5000000")
    write(group / "memory.usage_in_bytes", "6000000")
    assert available_host_bytes(tmp_path) == 0
