"""The race kernel by itself: bounds, ties, and independence of threads."""

import pytest
import torch

from headrace.nn.ops import team
from headrace.nn.ops.race import race


def run(
    logits: torch.Tensor, temperature: float, *, floor: float = -torch.inf, last_id: int | None = None, seed: int = 0
) -> torch.Tensor:
    n, vocab = logits.shape
    keys = torch.randint(-(2**31), 2**31, (n, 2), generator=torch.Generator().manual_seed(seed)).int()
    last = torch.full((n,), vocab if last_id is None else last_id, dtype=torch.int32)
    return race(logits, torch.full((n,), temperature), keys, torch.full((n,), floor), last)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_zero_takes_the_first_of_the_likeliest(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, vocab, dtype=dtype)
    logits[1, [vocab // 2, vocab - 1]] = 2.0
    logits[2, vocab - 1] = 1.0
    assert run(logits, 0.0).tolist() == [0, vocab // 2, vocab - 1]


def test_only_tokens_above_the_floor_or_early_ones_at_it_win() -> None:
    logits = torch.zeros(4000, 300)
    logits[:, 200] = 1.0
    logits[:, 10] = -0.5
    assert set(run(logits, 1.0, floor=0.0, last_id=4).tolist()) == {0, 1, 2, 3, 4, 200}


def test_equal_tokens_win_equally_often_wherever_they_stand() -> None:
    n, vocab = 40_000, 400
    counts = run(torch.zeros(1, vocab).expand(n, -1), 1.0).bincount(minlength=vocab)
    chi_square = ((counts - n / vocab) ** 2 / (n / vocab)).sum().item()
    # 399 degrees of freedom, and five standard deviations.
    assert chi_square < 399 + 5 * (2 * 399) ** 0.5


def test_threads_do_not_change_winners(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 3000, generator=torch.Generator().manual_seed(1))
    together = run(logits, 1.0)
    monkeypatch.setattr(team, "gomp_parallel", lambda: None)
    assert run(logits, 1.0).tolist() == together.tolist()


def test_rows_need_not_be_contiguous() -> None:
    logits = torch.randn(3000, 5, generator=torch.Generator().manual_seed(1))
    assert run(logits.T, 1.0).tolist() == run(logits.T.contiguous(), 1.0).tolist()
