"""Matrix products with weights that never change, laid out once for the kernel that will use them."""

import torch
import torch.nn.functional as F


class Linear:
    """``x @ weight.T + bias``; ``weight [out_features, in_features]`` is taken over."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._weight = weight

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias as they are kept."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_rows, in_features]`` to ``[num_rows, out_features]``."""
        return F.linear(x, self._weight, self._bias)

    def shares_storage_with(self, tensor: torch.Tensor) -> bool:
        """Whether the weight is kept as ``tensor`` itself, not in a copy."""
        return self._weight.data_ptr() == tensor.data_ptr()
