"""Memory for what a step reads at scattered places."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

_HUGE_PAGE_BYTES = 2 << 20


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros on ``device``; on a Linux CPU in memory that the kernel may back with huge pages.

    Paged attention jumps from block to block, a few kilobytes at each: with pages of 4 KiB nearly every jump misses the
    TLB, and no hardware prefetcher crosses a page. torch's allocator asks for huge pages only when an environment
    variable is set before it is loaded. As with ``torch.zeros``, memory is taken when it is first touched, though here
    two megabytes at a time.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    # A private mapping: a shared one, the default, would be a file in memory, with other rules for huge pages.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A Linux built without huge pages refuses the advice; the memory is as good as any other.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive.
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
