import os

import pytest

from headrace.bench import machine


def test_the_machine_is_described() -> None:
    found = machine.describe()
    assert found.num_cpus == len(os.sched_getaffinity(0))
    assert found.memory_bytes > 2**28
    assert set(found.flags) <= set(machine.FLAGS)
    assert f"{found.num_cpus} CPUs" in found.line()


def test_thread_counts_from_the_environment_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert machine.describe().environment["OMP_NUM_THREADS"] == "3"
