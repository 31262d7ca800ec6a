"""Rotary tables. Float32 step by step: an ulp of a frequency moves an angle at a million tokens by 0.1 rad."""

from __future__ import annotations

import math

import torch

from dsv4_backend.config import DSV4Config
from dsv4_backend.validation import expect_type

_CHUNK = 1 << 16


def rope_frequencies(cfg: DSV4Config, ratio: int) -> torch.Tensor:
    """float32 [rope_dim / 2], on the CPU: what each pair of channels turns by from one position to the next.

    Args:
        cfg: the model.
        ratio: compression ratio of the layer. All that rotates in a layer uses its table: ratio 0 (sliding window
            only) has the base `rope_theta`; 4 and 128 have `compress_rope_theta` with YaRN, for the window, too.

    Raises:
        ValueError: there is no such ratio in DeepSeek-V4.

    Source: spec/attention_math.md, section 2.
    """
    expect_type("cfg", cfg, DSV4Config)
    if ratio not in (0, 4, 128):
        raise ValueError(f"ratio: expected 0, 4 or 128, got {ratio!r}")
    theta = cfg.compress_rope_theta if ratio else cfg.rope_theta
    exponent = torch.arange(0, cfg.rope_dim, 2, dtype=torch.int64).float() / cfg.rope_dim
    frequencies = 1.0 / (theta**exponent)
    return _yarn(frequencies, cfg, theta) if ratio else frequencies


def rope_table(
    cfg: DSV4Config, ratio: int, num_positions: int | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """float32 [num_positions, rope_dim]: cosine and sine of each pair, interleaved, for positions 0 and up.

    The angle is the float32 product of position and frequency, as every implementation forms it; cosine and sine are
    those of that rounded angle, computed in float64. Nothing is scaled.

    Args:
        cfg, ratio: as for `rope_frequencies`.
        num_positions: rows; None: `cfg.max_position`.
        device: where the table goes.

    Raises:
        ValueError: no such ratio, or no position.
    """
    frequencies = rope_frequencies(cfg, ratio).to(device)
    rows = cfg.max_position if num_positions is None else num_positions
    if type(rows) is not int or rows < 1:
        raise ValueError(f"num_positions: expected an int of at least 1, got {num_positions!r}")
    table = torch.empty((rows, len(frequencies), 2), dtype=torch.float32, device=device)
    for start in range(0, rows, _CHUNK):
        position = torch.arange(start, min(rows, start + _CHUNK), device=device).float()
        angle = (position[:, None] * frequencies).double()
        table[start : start + _CHUNK, :, 0] = angle.cos()
        table[start : start + _CHUNK, :, 1] = angle.sin()
    return table.view(rows, cfg.rope_dim)


def _yarn(frequencies: torch.Tensor, cfg: DSV4Config, theta: float) -> torch.Tensor:
    """Frequencies that turn too rarely within the original context, divided by the factor, with a ramp between."""

    def dim_at(rotations: float) -> float:
        context = cfg.yarn_original_max_position
        return cfg.rope_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_at(cfg.yarn_beta_fast)), 0)
    high: float = min(math.ceil(dim_at(cfg.yarn_beta_slow)), cfg.rope_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - ramp) + (frequencies / cfg.yarn_factor) * ramp
