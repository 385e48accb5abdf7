"""The memory that the machine reports, and the limits derived from it."""

from types import SimpleNamespace

import pytest

from mlx_mtp import machine
from mlx_mtp.machine import MemoryLimit, machine_memory, wire_memory


def test_the_machine_has_what_the_system_says(monkeypatch, tmp_path):
    assert machine_memory().nbytes > 0
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       64 kB\nMemAvailable:   32 kB\nMemAvailableX: 1 kB\n")
    assert machine._meminfo("MemAvailable", meminfo) == 32 << 10
    assert machine._meminfo("MemAvailable", tmp_path / "none") is None
    for text, nbytes in (("12345\n", 12345), ("max\n", 2**63 - 1)):
        (tmp_path / "max").write_text(text)
        assert machine._cgroup_limit(tmp_path / "max") == nbytes
    monkeypatch.setattr(machine, "_cgroup_limit", lambda: 10_000)
    assert machine._host_memory() == MemoryLimit(10_000, "of this container")


def test_a_gpu_has_what_its_driver_says(monkeypatch):
    for info, nbytes in (
        ({"max_recommended_working_set_size": 48, "memory_size": 64}, 48),
        ({"total_memory": 80, "free_memory": 70}, 70),
        ({"memory_size": 64}, 64),
    ):
        fake = SimpleNamespace(default_device=str, gpu="", device_info=lambda info=info: info)
        monkeypatch.setattr(machine, "mx", fake)
        assert machine_memory().nbytes == nbytes


MACHINES = [("Darwin", "15.3", 100, [48]), ("Darwin", "26.0", 20, [20])]
MACHINES += [("Darwin", "14.7", 100, []), ("Linux", "", 100, []), ("CUDA", "", 100, [-100])]


@pytest.mark.parametrize(("system", "version", "limit", "wired"), MACHINES)
def test_a_mac_keeps_the_model_resident_and_cuda_keeps_to_the_limit(
    monkeypatch, system, version, limit, wired
):
    asked: list[int] = []
    fake = SimpleNamespace(
        metal=SimpleNamespace(is_available=lambda: system == "Darwin"),
        cuda=SimpleNamespace(is_available=lambda: system == "CUDA"),
        set_memory_limit=lambda nbytes: asked.append(-nbytes),
        device_info=lambda: {"max_recommended_working_set_size": 48},
        set_wired_limit=asked.append,
    )
    monkeypatch.setattr(machine, "mx", fake)
    monkeypatch.setattr(machine.platform, "system", lambda: system)
    monkeypatch.setattr(machine.platform, "mac_ver", lambda: (version, ("", "", ""), ""))
    wire_memory(MemoryLimit(limit, "a test"))
    assert asked == wired
