"""Kernels do every item exactly once, on torch's threads, on one alone, and from any thread."""

import threading
from types import SimpleNamespace

import pytest
import torch

from headrace.nn import threads
from headrace.nn.ops import kernels, team

ROWS, SIZE = 37, 600


def silu_of_ones(*, alone: bool = False) -> torch.Tensor:
    gate_up, output = torch.ones(ROWS, 2 * SIZE), torch.zeros(ROWS, SIZE)
    kernels.make_silu_mul(32).run(ROWS, (gate_up.data_ptr(), output.data_ptr(), SIZE, 2), alone=alone)
    return output


def expected() -> torch.Tensor:
    return torch.full((ROWS, SIZE), 0.7310586)


def test_alone_and_together_do_the_same() -> None:
    torch.testing.assert_close(silu_of_ones(alone=True), expected())
    torch.testing.assert_close(silu_of_ones(), expected())


def test_without_an_openmp_runtime_the_calling_thread_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "gomp_parallel", lambda: None)
    torch.testing.assert_close(silu_of_ones(), expected())


def test_any_thread_may_call() -> None:
    seen = SimpleNamespace(output=None)
    thread = threading.Thread(target=lambda: setattr(seen, "output", silu_of_ones()))
    thread.start()
    thread.join(timeout=30)
    torch.testing.assert_close(seen.output, expected())


def test_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        threads.set_num_threads(3)
        assert torch.get_num_threads() == 3
        torch.testing.assert_close(silu_of_ones(), expected())
        with pytest.raises(ValueError, match="at least 1"):
            threads.set_num_threads(0)
    finally:
        torch.set_num_threads(before)
