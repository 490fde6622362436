"""Free memory of the host and of a container, from files of the test."""

import pytest

from jaxflow.kv.tiers import host_machine

GIB = 2**30
FREE = 24 * GIB  # bytes of the machine


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 24 GiB of free memory and no limit of its cgroup."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {FREE // 1024} kB\n")
    monkeypatch.setattr(host_machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_machine, "CGROUP", tmp_path / "cgroup")
    return tmp_path / "cgroup"


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("most", "used", "stat", "free"),
    [
        (8 * GIB, 3 * GIB, "anon 7\nactive_file 0\ninactive_file 0", 5 * GIB),
        (
            8 * GIB,
            7 * GIB,
            f"active_file {2 * GIB}\ninactive_file {3 * GIB}\nshmem {GIB}",
            6 * GIB,
        ),  # files' pages are given up
        (8 * GIB, 9 * GIB, "anon 7", 0),
        (100 * GIB, 3 * GIB, "anon 7", FREE),  # more than the machine has
        ("max", 3 * GIB, "anon 7", FREE),
        ("what", 3 * GIB, "anon 7", FREE),
    ],
)
def test_a_containers_free_memory_is_the_rest_of_its_limit(machine, most, used, stat, free):
    write(machine, memory__max=most, memory__current=used, memory__stat=stat)
    assert host_machine.free_host_bytes() == free


def test_a_container_of_cgroups_version_1(machine):
    stat = f"inactive_file 1\ntotal_active_file 0\ntotal_inactive_file {GIB}"
    files = {"memory__limit_in_bytes": 8 * GIB, "memory__usage_in_bytes": 3 * GIB, "memory__stat": stat}
    write(machine / "memory", **files)
    assert host_machine.free_host_bytes() == 6 * GIB
    write(machine / "memory", memory__limit_in_bytes=2**63 - 4096)  # no limit
    assert host_machine.free_host_bytes() == FREE


def test_a_container_without_cache_statistics(machine):
    write(machine, memory__max=8 * GIB, memory__current=3 * GIB)
    assert host_machine.free_host_bytes() == 5 * GIB


def test_the_machines_free_memory_without_a_container(machine):
    assert not machine.exists() and host_machine.free_host_bytes() == FREE
