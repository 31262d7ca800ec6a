"""Weights in float8 blocks: every value, every scale, ties, and blocks that are cut off."""

from __future__ import annotations

import pytest
import torch

from dsv4_backend.fp8_blocks import dequantise, quantise

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
ALL_CODES = torch.arange(256, dtype=torch.uint8).view(E4M3)
POSITIVE = ALL_CODES[:127].double()
"""0 to 448, ascending."""


def test_every_value_with_every_scale() -> None:
    expected = ALL_CODES.double()
    for byte in range(255):
        scale = torch.tensor([[byte]], dtype=torch.uint8)
        found = dequantise(ALL_CODES[None, :128], scale)[0], dequantise(ALL_CODES[None, 128:], scale)[0]
        exact = (expected * 2.0 ** (byte - 127)).float()  # infinite where float32 ends
        torch.testing.assert_close(torch.cat(found), exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [E8M0, torch.uint8, torch.float32], ids=["e8m0", "uint8", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["to-float32", "to-bfloat16"])
@pytest.mark.parametrize(
    "shape", [(1, 1), (128, 256), (129, 127), (300, 257)], ids=lambda shape: f"{shape[0]}x{shape[1]}"
)
def test_each_block_has_its_scale(shape: tuple[int, int], kind: torch.dtype, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator).to(E4M3)
    down, across = -(-shape[0] // 128), -(-shape[1] // 128)
    exponents = torch.randint(-20, 20, (down, across), generator=generator)
    scales = 2.0 ** exponents.float() if kind is torch.float32 else (exponents + 127).to(torch.uint8)
    found = dequantise(values, scales.view(E8M0) if kind is E8M0 else scales, dtype)
    assert found.dtype is dtype
    for row in range(shape[0]):
        for column in {0, shape[1] // 2, shape[1] - 1}:
            expected = values[row, column].double() * 2.0 ** exponents[row // 128, column // 128].item()
            assert found[row, column].double() == expected, (row, column)


@pytest.mark.parametrize("exponent", [-126, -100, -30, -1, 0, 1, 30, 100, 118])
def test_quantised_values_are_the_nearest_and_ties_go_to_even(exponent: int) -> None:
    """All values, all midpoints, and the neighbours of these in float32, beside the largest value of a block."""
    middle = (POSITIVE[:-1] + POSITIVE[1:]) / 2
    points = torch.cat((POSITIVE, middle)).float()
    points = torch.cat((points, points.nextafter(torch.tensor(0.0)), points.nextafter(torch.tensor(448.0))))
    points = torch.cat((points, -points, torch.tensor([448.0])))
    grid = torch.zeros(12, 128)
    grid.view(-1)[: len(points)] = points
    if exponent < -100:  # what float32 could not hold beside such a scale
        grid[grid.abs() < 1] = 0
    codes, scales = quantise(grid * 2.0**exponent)
    assert scales.view(torch.uint8).tolist() == [[exponent + 127]]
    # The nearest of all values; of two equally near ones, that with an even code.
    distance = (grid.double().abs().view(-1, 1) - POSITIVE).abs()
    nearest = (distance == distance.amin(dim=1, keepdim=True)).double()
    nearest[:, 1::2] *= 0.5
    expected = POSITIVE[nearest.argmax(dim=1)].view(grid.shape).copysign(grid.double())
    assert torch.equal(codes.double(), expected)


def test_a_scale_is_the_smallest_power_of_two_that_holds_the_block() -> None:
    for exponent in range(-133, 119):
        for amax in (
            torch.tensor(448.0 * 2.0**exponent),
            torch.tensor(448.0 * 2.0**exponent).nextafter(torch.tensor(torch.inf)),
        ):
            codes, scales = quantise(torch.full((1, 1), amax.item()))
            factor = scales.double().item()
            # At 2^-126 float32 loses digits of the quotient, and there is no scale below.
            assert amax.double().item() <= 448 * factor
            assert factor <= 2.0**-126 or amax.double().item() > 448 * factor / 2, (exponent, factor)
            assert codes.double().item() <= 448
    codes, scales = quantise(torch.zeros(1, 300))
    assert not codes.double().any()
    assert scales.shape == (1, 3)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (200, 130), (0, 5)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_blocks_go_there_and_back(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
    codes, scales = quantise(values)
    once = dequantise(codes, scales)
    assert codes.is_contiguous()
    assert torch.equal(dequantise(*quantise(once)), once)
    largest = values.abs().amax() if values.numel() else 0
    assert ((once - values).abs() <= values.abs() / 16 + largest * 2**-17).all()


@pytest.mark.parametrize(
    ("values", "scales", "message"),
    [
        (torch.zeros(4, 4), torch.ones(1, 1), "values: expected dtype float8_e4m3fn, got float32"),
        (torch.zeros(4).to(E4M3), torch.ones(1, 1), "values: expected 2 dimensions"),
        (
            torch.zeros(4, 4).to(E4M3),
            torch.ones(1, 1).half(),
            "scales: expected dtype float8_e8m0fnu or uint8 or float32",
        ),
        (torch.zeros(4, 129).to(E4M3), torch.ones(1, 1), r"values \[4, 129\], \[1, 2\], got \[1, 1\]"),
        (torch.zeros(4, 129).to(E4M3), torch.ones(2, 1), r"\[1, 2\], got \[2, 1\]"),
        (
            torch.zeros(4, 129).to(E4M3),
            torch.tensor([[1.0, 0.0]]),
            r"scales\[0, 1\]: expected a positive finite .*, got 0",
        ),
        (torch.zeros(4, 4).to(E4M3), torch.tensor([[-1.0]]), "expected a positive finite number, got -1"),
        (
            torch.zeros(4, 4).to(E4M3),
            torch.tensor([[255]], dtype=torch.uint8),
            "expected a positive finite .*, got nan",
        ),
    ],
    ids=["not float8", "rank", "half scales", "too few", "transposed", "zero", "negative", "no number"],
)
def test_blocks_that_are_refused(values: torch.Tensor, scales: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantise(values, scales)


def test_values_that_cannot_be_quantised() -> None:
    with pytest.raises(ValueError, match="values: expected finite numbers, got infinity or NaN"):
        quantise(torch.tensor([[1.0, torch.nan]]))
    with pytest.raises(ValueError, match="values: expected 2 dimensions"):
        quantise(torch.zeros(3))
