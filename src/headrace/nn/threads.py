"""How many threads compute: one number for every library that keeps a pool of its own."""

import torch


def set_num_threads(num_threads: int) -> None:
    """Use ``num_threads`` for matrix products and kernels alike. Call it before the first forward pass.

    Raises:
        ValueError: ``num_threads`` is less than 1.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
    torch.set_num_threads(num_threads)
