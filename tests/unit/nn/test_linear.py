"""The prepacked product and the plain one agree."""

import pytest
import torch

from headrace.nn.ops.linear import Linear, can_prepack

CPU = torch.device("cpu")


@pytest.mark.skipif(not can_prepack(torch.bfloat16, CPU), reason="this CPU has no bfloat16 products to prepack for")
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (33, 50), (960, 576)])
def test_prepacked_agrees_with_plain(rows: int, biased: bool, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x, bias = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((outputs, inputs), (rows, inputs), (outputs,))
    )
    packed = Linear(weight.clone(), bias if biased else None, prepack=True)
    plain = Linear(weight.clone(), bias if biased else None, prepack=False)
    torch.testing.assert_close(packed(x), plain(x), rtol=2e-2, atol=5e-2)


def test_float32_is_never_repacked() -> None:
    weight = torch.randn(8, 8)
    assert Linear(weight).shares_storage_with(weight)
    assert not can_prepack(torch.float32, CPU)
    assert not can_prepack(torch.bfloat16, torch.device("cuda"))
