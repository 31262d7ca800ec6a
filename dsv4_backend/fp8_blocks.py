"""Weights in float8 blocks, as released checkpoints have them: e4m3 values, one power-of-two scale a block."""

from __future__ import annotations

import torch

from dsv4_backend.validation import expect_tensor

BLOCK = 128
"""Rows and columns of a block; those at the lower and right edge may be cut off."""
E4M3_MAX = 448.0
SCALE_DTYPES = (torch.float8_e8m0fnu, torch.uint8, torch.float32)


def block_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many blocks a weight of `shape` has each way: the shape of its scales."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def dequantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a weight in blocks stands for: each value times the scale of its block.

    Args:
        values: float8_e4m3fn [n, k].
        scales: [ceil(n / 128), ceil(k / 128)], on the same device. float8_e8m0fnu or uint8: a byte b stands for
            2^(b - 127), and 255 is no number. float32: the factor itself, positive and finite.
        dtype: of the result. Every product with a power of two is exact in float32, and in bfloat16 down to 2^-126.

    Returns:
        `dtype` [n, k]. A NaN stays one, and beyond the largest number of `dtype` there is infinity.

    Raises:
        ValueError: a dtype, shape or device is not as above; or a scale is NaN, infinite, zero or negative: the message
            says which. Waits for the device to find out.

    Source: spec/attention_math.md, section 6.
    """
    expect_tensor("values", values, dtypes=(torch.float8_e4m3fn,), ndim=2)
    expect_tensor("scales", scales, dtypes=SCALE_DTYPES, ndim=2, device=values.device)
    rows, columns = values.shape
    if tuple(scales.shape) != block_shape((rows, columns)):
        raise ValueError(
            f"scales: expected one for each block of {BLOCK} x {BLOCK} of values {[rows, columns]}, "
            f"{list(block_shape((rows, columns)))}, got {list(scales.shape)}"
        )
    factors = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
    wrong = ~(torch.isfinite(factors) & (factors > 0))
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise ValueError(f"scales{place}: expected a positive finite number, got {factors[tuple(place)].item()}")
    # Each way by itself, cut off where the weight ends.
    factors = factors.repeat_interleave(BLOCK, dim=0)[:rows].repeat_interleave(BLOCK, dim=1)[:, :columns]
    return factors.mul_(values.float()).to(dtype)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in blocks: the other way round from `dequantise`.

    The scale of a block is the smallest power of two that is at least its largest magnitude / 448, by the bits of the
    float32 quotient, and 2^-127 for a block of zeros. Values are rounded to the nearest e4m3, ties to even.

    Args:
        values: float32, bfloat16 or float16 [n, k], finite.

    Returns:
        float8_e4m3fn [n, k] and float8_e8m0fnu [ceil(n / 128), ceil(k / 128)].

    Raises:
        ValueError: a dtype or the rank is not as above, or a value is not finite.

    Source: spec/attention_math.md, section 6, which has the rule of the scale for cache entries.
    """
    expect_tensor("values", values, dtypes=(torch.float32, torch.bfloat16, torch.float16), ndim=2)
    if not torch.isfinite(values).all():
        raise ValueError("values: expected finite numbers, got infinity or NaN")
    (rows, columns), (down, across) = values.shape, block_shape((values.shape[0], values.shape[1]))
    padded = torch.zeros((down * BLOCK, across * BLOCK), dtype=torch.float32, device=values.device)
    padded[:rows, :columns] = values
    blocks = padded.view(down, BLOCK, across, BLOCK)
    bits = (blocks.abs().amax(dim=(1, 3)) / E4M3_MAX).view(torch.int32)
    scales = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8).view(torch.float8_e8m0fnu)
    codes = (blocks / scales.float()[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(down * BLOCK, across * BLOCK)[:rows, :columns].contiguous(), scales
