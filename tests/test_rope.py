"""Rope tables: the released frequencies, in float32 step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4_backend import DSV4Config, rope_table
from dsv4_backend.rope import rope_frequencies

FLASH = DSV4Config.v4_flash()


def test_window_layers_have_no_yarn() -> None:
    exponent = np.arange(0, 64, 2, dtype=np.float32) / np.float32(64)
    expected = 1.0 / np.power(np.float32(10_000), exponent, dtype=np.float32)
    assert np.allclose(rope_frequencies(FLASH, 0).numpy(), expected, rtol=2e-7, atol=0)


def test_yarn_keeps_blends_and_divides() -> None:
    plain = 1.0 / (160_000.0 ** (torch.arange(0, 64, 2).float() / 64))
    found = rope_frequencies(FLASH, 4)
    assert found.dtype == torch.float32
    assert torch.equal(found, rope_frequencies(FLASH, 128))
    assert torch.equal(found[:16], plain[:16])
    assert torch.equal(found[25:], plain[25:] / 16)
    blend = torch.arange(1, 10) / 10
    assert torch.allclose(found[16:25], plain[16:25] * (1 - blend) + plain[16:25] / 16 * blend, rtol=1e-6, atol=0)


def test_angles_are_float32_products() -> None:
    position, pair = 70_001, 3
    table = rope_table(FLASH, 4, position + 1)
    assert table.shape == (position + 1, 64)
    angle = (torch.tensor(position).float() * rope_frequencies(FLASH, 4)[pair]).double()
    assert float(table[position, 2 * pair]) == pytest.approx(float(angle.cos()), abs=1e-7)
    assert float(table[position, 2 * pair + 1]) == pytest.approx(float(angle.sin()), abs=1e-7)
    assert torch.equal(table[0], torch.tensor([1.0, 0.0]).repeat(32))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="ratio: expected 0, 4 or 128, got 1"):
        rope_frequencies(FLASH, 1)
    with pytest.raises(ValueError, match="num_positions: expected an int of at least 1, got 0"):
        rope_table(FLASH, 0, 0)
