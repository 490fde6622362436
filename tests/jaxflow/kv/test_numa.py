"""CPUs near the GPUs on machines with several NUMA nodes, from a /sys of the test."""

import os
import threading

import pytest

from jaxflow.kv.tiers import host_machine


@pytest.fixture
def machine(tmp_path):
    """A machine with two sockets, a GPU on each, and a GPU of unknown node."""
    for node, cpus in ((0, "0-3,8-11\n"), (1, "4-7,12-15\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    for bus, node in (("0000:17:00.0", 0), ("0000:ca:00.0", 1), ("0000:01:00.0", -1)):
        folder = tmp_path / "bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("bus_ids", "cpus"),
    [
        (["00000000:17:00.0"], {0, 1, 2, 3, 8, 9, 10, 11}),
        (["00000000:CA:00.0"], {4, 5, 6, 7, 12, 13, 14, 15}),
        (["00000000:17:00.0", "00000000:CA:00.0"], set(range(16))),
        (["00000000:01:00.0"], None),
        (["00000000:99:00.0"], None),
        ([], None),
    ],
)
def test_the_cpus_of_the_gpus_nodes(machine, bus_ids, cpus):
    assert host_machine.near_cpus(bus_ids, machine) == cpus


def test_a_single_node_gives_none(machine):
    (machine / "devices/system/node/node1/cpulist").unlink()
    (machine / "devices/system/node/node1").rmdir()
    assert host_machine.near_cpus(["00000000:17:00.0"], machine) is None


@pytest.mark.parametrize(("text", "cpus"), [("0", {0}), ("0-2,5\n", {0, 1, 2, 5}), ("", set())])
def test_parse_cpus(text, cpus):
    assert host_machine.parse_cpus(text) == cpus


def test_bind_affects_one_thread_only():
    before, found = os.sched_getaffinity(0), []
    one = {min(before)}
    host_machine.run_bound(one, lambda: found.append(os.sched_getaffinity(0)))
    host_machine.run_bound({10**4}, lambda: found.append(os.sched_getaffinity(0)))  # none that it may use
    assert found == [one, before]
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ZeroDivisionError):
        host_machine.run_bound(None, lambda: 1 // 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxflow-reserve"]


def test_threads_started_in_bound_stay_bound():
    before, found = os.sched_getaffinity(0), []
    one, go = {min(before)}, threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(30), found.append(os.sched_getaffinity(0))))
    with pytest.raises(ZeroDivisionError), host_machine.bound(one):
        assert os.sched_getaffinity(0) == one
        thread.start()
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before
    go.set()
    thread.join()
    assert found == [one]
    with host_machine.bound(None):
        assert os.sched_getaffinity(0) == before


def test_no_bus_ids_without_a_driver():
    assert host_machine.gpu_bus_ids(1) == [] or all(":" in bus_id for bus_id in host_machine.gpu_bus_ids(1))
