"""Zeros in memory of their own."""

import gc

import pytest
import torch

from headrace.nn import memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(3, 5), (3, 1 << 20)], ids=["small", "huge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_have_shape_and_dtype_and_can_be_written(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tensor = memory.zeros(shape, dtype, CPU)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor[1] = 7
    assert tensor.sum(dtype=torch.float64) == 7 * shape[1]


def test_a_view_keeps_the_memory_after_the_whole_is_gone() -> None:
    whole = memory.zeros((2, 1 << 20), torch.float32, CPU)
    whole[1] = 3
    part = whole[1]
    del whole
    gc.collect()
    assert (part == 3).all()


def test_zeros_are_served_where_huge_pages_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    assert not memory.zeros((2, 1 << 20), torch.float32, CPU).any()
