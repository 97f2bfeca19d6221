"""Every layout's product agrees with plain torch, and a row of ours does not depend on the rows beside it."""

import pytest
import torch
import torch.nn.functional as F

from headrace.nn.ops import kernels, linear, panels, vector
from headrace.nn.ops.linear import Layout, layout_for, make_gated, make_linear

CPU = torch.device("cpu")
HAS_ONEDNN = linear._has_onednn()
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [
        Layout.PLAIN,
        Layout.PANELS,
        pytest.param(
            Layout.ONEDNN, marks=pytest.mark.skipif(not HAS_ONEDNN, reason="oneDNN has no bfloat16 product on this CPU")
        ),
    ],
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SHAPES = pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (34, 50), (960, 576), (2, 33)])
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(
    outputs: int, inputs: int, rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight, bias, input, and a residual."""
    weight = random(outputs, inputs, seed=1).mul(inputs**-0.5)
    return (
        weight.to(dtype),
        random(outputs, seed=2).to(dtype),
        random(rows, inputs, seed=3).to(dtype),
        random(rows, outputs, seed=4).to(dtype),
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@LAYOUTS
@DTYPES
@SHAPES
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_products_agree(layout: Layout, dtype: torch.dtype, outputs: int, inputs: int, rows: int, biased: bool) -> None:
    if layout is Layout.ONEDNN and dtype == torch.float32:
        layout = Layout.PLAIN
    weight, bias, x, residual = case(outputs, inputs, rows, dtype)
    product = make_linear(weight.clone(), bias if biased else None, layout)
    expected = F.linear(x.float(), weight.float(), bias.float() if biased else None)
    assert_close(product(x), expected)
    total = residual.clone()
    product.add_to(total, x)
    assert_close(total, residual.float() + expected)
    gated = make_gated(weight.clone(), bias if biased else None, layout)
    gate, up = expected.chunk(2, dim=-1)
    assert_close(gated(x), F.silu(gate) * up)


@DTYPES
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    weight, bias, x, _residual = case(100, 96, 300, dtype)
    for product in (make_linear(weight, bias, Layout.PANELS), make_gated(weight, bias, Layout.PANELS)):
        together = product(x)
        for some in (slice(0, 1), slice(7, 20), slice(250, 300)):
            assert torch.equal(product(x[some].contiguous()), together[some])


def test_without_bfloat16_instructions_the_result_is_the_same_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _bias, x, _residual = case(100, 96, 13, torch.bfloat16)
    product = panels.PanelLinear(weight, None)
    monkeypatch.setattr(vector, "has_bfloat16_dot", lambda: False)
    # The stamp is part of the compiled kernel's name in caches.
    product._plain = panels.make_product(16, panels._PLAIN, kernels.STAMP + 1)
    assert_close(product(x), F.linear(x.float(), weight.float()))


def test_float32_and_other_devices_keep_the_checkpoints_layout() -> None:
    assert layout_for(torch.float32, CPU) is Layout.PLAIN
    assert layout_for(torch.bfloat16, torch.device("cuda")) is Layout.PLAIN


@pytest.mark.parametrize(
    ("has_amx", "has_dot", "expected"),
    [
        (True, True, Layout.ONEDNN if HAS_ONEDNN else Layout.PLAIN),
        (False, True, Layout.PANELS),
        (False, False, Layout.PLAIN),
    ],
)
def test_bfloat16_goes_where_the_cpu_is_fastest(
    monkeypatch: pytest.MonkeyPatch, has_amx: bool, has_dot: bool, expected: Layout
) -> None:
    monkeypatch.setattr(vector, "has_amx", lambda: has_amx)
    monkeypatch.setattr(vector, "has_bfloat16_dot", lambda: has_dot)
    assert layout_for.__wrapped__(torch.bfloat16, CPU) is expected


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 700), (70, 33)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_silu_mul_agrees(dtype: torch.dtype, rows: int, size: int, scale: float) -> None:
    gate_up = random(rows, 2 * size).mul(scale).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    rtol = 1e-6 if dtype == torch.float32 else 1e-2
    actual = linear.silu_mul(gate_up).float()
    torch.testing.assert_close(actual, F.silu(gate) * up, rtol=rtol, atol=1e-6 if dtype == torch.float32 else 1e-3)
