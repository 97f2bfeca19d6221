"""How many threads compute: torch's number, because kernels run on torch's threads too."""

import torch


def set_num_threads(num_threads: int) -> None:
    """Use ``num_threads`` for matrix products and kernels alike; for the whole process.

    Raises:
        ValueError: ``num_threads`` is less than 1.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
    torch.set_num_threads(num_threads)
