"""Norm, rope, quantisation and storing of cache entries in plain torch, and reading them back."""

from __future__ import annotations

import torch
from einops import rearrange

from dsv4_backend.layouts import QUANT_BLOCK, SCALE_BYTES, EntryPool

E4M3_MAX = 448.0
MIN_AMAX = 1e-4
"""Blocks of smaller values share this one's scale."""


def store_window(
    *,
    kv: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rope: torch.Tensor,
    pool: EntryPool,
) -> None:
    """Norms, ropes and stores window entries; arguments as in `dsv4_backend.compressor.store_window`."""
    store_entries(values=norm_rope(kv, norm_weight, eps, positions, rope), slots=slots, pool=pool)


def norm_rope(
    values: torch.Tensor, norm_weight: torch.Tensor, eps: float, positions: torch.Tensor, rope: torch.Tensor
) -> torch.Tensor:
    """float32 [n, head_dim]: RMS norm over the channels, then the last ones rotated by their position."""
    values = values.float()
    values = values / (values.square().mean(dim=-1, keepdim=True) + eps).sqrt() * norm_weight
    return rotate(values, positions, rope)


def rotate(values: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Turns the last channels, pair by pair, by the angles of `rope`, float32 [positions, rope_dim] (cos, sin).

    They become 0 at a position that the table does not have.
    """
    rest, turning = values.split((values.shape[-1] - rope.shape[1], rope.shape[1]), dim=-1)
    even, odd = rearrange(turning, "n (pair two) -> two n pair", two=2)
    cos, sin = rearrange(angles_at(positions, rope), "n (pair two) -> two n pair", two=2)
    turned = rearrange([even * cos - odd * sin, even * sin + odd * cos], "two n pair -> n (pair two)")
    return torch.cat((rest, turned), dim=-1)


def angles_at(positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rows of `rope`, 0 for a position that it does not have."""
    known = (positions >= 0) & (positions < len(rope))
    return rope[positions.where(known, 0).long()].where(known[:, None], 0.0)


def hadamard(values: torch.Tensor) -> torch.Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dimension, in natural order; it is its own inverse."""
    size = values.shape[-1]
    step = 1
    while step < size:
        pairs = values.unflatten(-1, (size // (2 * step), 2, step))
        values = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        step *= 2
    return values * size**-0.5


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """uint8: exponent + 127 of the smallest power of two that is at least amax / 448, by the bits of the quotient."""
    bits = (amax.clamp(min=MIN_AMAX) / E4M3_MAX).view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)


def scale_value(scale: torch.Tensor) -> torch.Tensor:
    """float32: what a scale byte stands for."""
    return (scale.int() << 23).view(torch.float32)


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 e4m3 of float32 [n, k * 64], rounded to bfloat16 first, and the scale bytes, uint8 [n, k]."""
    blocks = rearrange(values.bfloat16().float(), "n (block channel) -> n block channel", channel=QUANT_BLOCK)
    scale = power_of_two_scale(blocks.abs().amax(dim=-1))
    return to_e4m3((blocks / scale_value(scale)[..., None]).flatten(1)), scale


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Bytes of the nearest float8 e4m3, ties to even; beyond the largest one, that one."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of float8 e4m3 bytes."""
    return codes.view(torch.float8_e4m3fn).float()


def store_entries(*, values: torch.Tensor, slots: torch.Tensor, pool: EntryPool) -> None:
    """Stores entries that are normed and roped; arguments as in `dsv4_backend.compressor.store_entries`."""
    slots = slots.long()
    kept = (slots > 0) & (slots < pool.num_slots)
    values, slots, layout = values.float()[kept], slots[kept], pool.layout
    if not len(slots):
        return
    if layout.hadamard:
        values = hadamard(values)
    if layout.format != "fp8":
        pool.data[slots] = values.to(layout.dtype)
    elif layout.indexer:
        scale = values.abs().amax(dim=-1, keepdim=True).clamp(min=MIN_AMAX) / E4M3_MAX
        data, scales = _places(pool, slots, 4)
        _put(pool, data, to_e4m3(values / scale))
        _put(pool, scales, scale.view(torch.uint8))
    else:
        codes, scale = quantize(values[:, : -layout.rope_dim])
        turning = values[:, -layout.rope_dim :].bfloat16().view(torch.uint8)
        data, scales = _places(pool, slots, scale.shape[1])
        _put(pool, data, torch.cat((codes, turning), dim=1))
        _put(pool, scales, scale)


def load_entries(pool: EntryPool, slots: torch.Tensor) -> torch.Tensor:
    """float32 [n, head_dim]: the entries of `slots` as a reader sees them; indexer keys stay transformed."""
    slots, layout = slots.long(), pool.layout
    if layout.format != "fp8":
        return pool.data[slots].float()
    blocks = 1 if layout.indexer else (layout.head_dim - layout.rope_dim) // QUANT_BLOCK
    data, scales = (_take(pool, place) for place in _places(pool, slots, 4 if layout.indexer else blocks))
    if layout.indexer:
        return from_e4m3(data) * scales.view(torch.float32)
    rest = from_e4m3(data[:, : blocks * QUANT_BLOCK]) * scale_value(scales).repeat_interleave(QUANT_BLOCK, dim=1)
    return torch.cat((rest, data[:, blocks * QUANT_BLOCK :].contiguous().view(torch.bfloat16).float()), dim=1)


def _places(pool: EntryPool, slots: torch.Tensor, num_scale_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte offsets in an fp8 pool: of the data of each slot, and of its scales."""
    layout = pool.layout
    page, entry = slots // layout.page_entries, slots % layout.page_entries
    data = page * layout.page_bytes + entry * layout.row_bytes
    scale_stride = 4 if layout.indexer else SCALE_BYTES
    scales = page * layout.page_bytes + layout.page_entries * layout.row_bytes + entry * scale_stride
    byte = torch.arange(max(layout.row_bytes, num_scale_bytes), device=slots.device)
    return data[:, None] + byte[: layout.row_bytes], scales[:, None] + byte[:num_scale_bytes]


def _put(pool: EntryPool, places: torch.Tensor, values: torch.Tensor) -> None:
    pool.data.view(-1)[places] = values


def _take(pool: EntryPool, places: torch.Tensor) -> torch.Tensor:
    return pool.data.view(-1)[places]
