"""Storing of entries: packed bytes by the rules of the format, and the window's norm and rope."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends import each_backend
from cache_harness import EPS, norm_rope
from dsv4_backend import EntryLayout, EntryPool, store_entries, store_window
from dsv4_backend.reference import kv_store as reference

PACKED = EntryLayout("fp8", 512, 64, 4)
KEYS = EntryLayout("fp8", 128, 64, 4, indexer=True)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
"""Values of the codes 0 to 126, ascending; 126 stands for 448."""


def poisoned_pool(layout: EntryLayout, num_pages: int, device: str) -> EntryPool:
    pool = EntryPool.empty(layout, num_pages, device)
    pool.data.view(torch.uint8).fill_(0xFF)
    return pool


def nearest_code(values: np.ndarray) -> np.ndarray:
    """e4m3 bytes of float64 values by distance: the nearest code, of two the even one."""
    size = np.minimum(np.abs(values), 448.0)
    above = np.clip(np.searchsorted(E4M3, size), 1, 126)
    to_above, to_below = E4M3[above] - size, size - E4M3[above - 1]
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    code = np.where(take_above, above, above - 1).astype(np.uint8)
    return np.where(np.signbit(values), code | 0x80, code)


def packed_bytes(values: torch.Tensor, rope_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Data and scale bytes of float32 rows, computed in float64 from the rules in words."""
    rounded = values.cpu().bfloat16()
    rest = rounded[:, :-rope_dim].double().numpy().reshape(len(values), -1, 64)
    amax = np.maximum(np.abs(rest).max(axis=2), np.float64(np.float32(1e-4)))
    quotient = (amax.astype(np.float32) / np.float32(448)).astype(np.float64)
    fraction, exponent = np.frexp(quotient)
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)
    codes = nearest_code(rest / np.exp2(exponent)[..., None]).reshape(len(values), -1)
    turning = rounded[:, -rope_dim:].contiguous().view(torch.uint8).numpy()
    return np.concatenate((codes, turning), axis=1), (exponent + 127).astype(np.uint8)


def awkward_values(device: str) -> torch.Tensor:
    """float32 [n, 512]: every finite bfloat16, every tie and border of e4m3 in blocks of every exponent, noise."""
    every = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    every = every[every.isfinite()]
    every = torch.cat((every, torch.zeros(-len(every) % 512))).view(-1, 512)
    codes = torch.from_numpy(E4M3).float()
    ties = (codes[1:] + codes[:-1]) / 2
    block = torch.cat((codes, -codes, ties, -ties, codes[-1:].expand(6)))  # 512, with 448 in every 64 or nearly so
    block = block.view(8, 64).clone()
    block[:, 0] = 448.0
    scaled = block.flatten() * torch.exp2(torch.arange(-22.0, 20.0))[:, None]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((40, 512), generator=generator) * torch.exp2(
        torch.randint(-14, 5, (40, 512), generator=generator).float()
    )
    return torch.cat((every, scaled, noise)).to(device)


@each_backend
def test_packed_bytes(impl: str, device: str) -> None:
    values = awkward_values(device)
    pages = len(values) // 4 + 2
    pool = poisoned_pool(PACKED, pages, device)
    slots = torch.randperm(pages * 4 - 4, generator=torch.Generator().manual_seed(1))[: len(values)] + 4
    store_entries(values, slots.to(device), pool, impl=impl)
    data, scales = packed_bytes(values, 64)
    expected = np.full(tuple(pool.data.shape), 0xFF, np.uint8)
    for row, slot in enumerate(slots.tolist()):
        page, entry = divmod(slot, 4)
        expected[page, entry * 576 : entry * 576 + 576] = data[row]
        expected[page, 4 * 576 + entry * 8 : 4 * 576 + entry * 8 + 7] = scales[row]
    # The eighth scale byte, the page's end and slots that nobody stored stay as they were.
    found = pool.data.cpu().numpy()
    place = np.argwhere(found != expected)
    assert not len(place), f"{len(place)} bytes, the first at {place[0]}"


@each_backend
def test_packed_pages_of_another_shape(impl: str, device: str) -> None:
    layout = EntryLayout("fp8", 128, 64, 3)
    values = awkward_values(device)[-30:].reshape(-1, 128)[:20].contiguous()
    pool = poisoned_pool(layout, 9, device)
    slots = torch.arange(3, 23, device=device)
    store_entries(values, slots, pool, impl=impl)
    data, scales = packed_bytes(values, 64)
    found = pool.data.cpu().numpy()
    for row in range(20):
        page, entry = divmod(row + 3, 3)
        assert np.array_equal(found[page, entry * 192 : entry * 192 + 192], data[row])
        assert found[page, 3 * 192 + entry * 8] == scales[row, 0]


@each_backend
def test_indexer_keys(impl: str, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((37, 128), generator=generator).to(device)
    values[3], values[4] = 0.0, 1e-7
    pool = poisoned_pool(KEYS, 12, device)
    slots = torch.arange(4, 41, device=device)
    store_entries(values, slots, pool, impl=impl)
    # Sylvester's matrix by its definition: the sign is the parity of the common bits.
    index = np.arange(128)
    common = index[:, None] & index
    parity = sum((common >> bit) & 1 for bit in range(7)) % 2
    transformed = values.cpu().double().numpy() @ (1.0 - 2.0 * parity) / np.sqrt(128)
    scale = np.maximum(np.abs(transformed).max(axis=1), 1e-4) / 448
    found = pool.data.cpu().numpy()
    for row in range(37):
        page, entry = divmod(row + 4, 4)
        stored = found[page, 512 + 4 * entry : 516 + 4 * entry].copy().view(np.float32)[0]
        assert stored == pytest.approx(scale[row], rel=1e-6)
        # A value may sit on a border between two codes: one of the two, then.
        code = found[page, entry * 128 : entry * 128 + 128]
        low, high = (nearest_code(transformed[row] / stored + move) for move in (-1e-4, 1e-4))
        assert ((code == low) | (code == high)).all()
    assert np.array_equal(found[0], np.full(4 * 132, 0xFF, np.uint8))


@each_backend
@pytest.mark.parametrize("kv", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_window_entries(impl: str, device: str, kv: str, dtype: torch.dtype) -> None:
    layout = EntryLayout(kv, 512, 64, 8)
    pool = poisoned_pool(layout, 6, device)
    generator = torch.Generator().manual_seed(0)
    base = torch.randn((11, 2 * 512), generator=generator).to(device, dtype)
    rows = base[:, 512:]  # not contiguous
    slots = torch.tensor([9, 0, 47, 8, 30, -1, 12, 48, 1000, 31, 33], dtype=torch.int32, device=device)
    positions = torch.tensor(
        [[5, 0], [0, 0], [700, 0], [1, 0], [2, 0], [3, 0], [699, 0], [8, 0], [9, 0], [10, 0], [11, 0]]
    )
    positions = positions.to(device)[:, 0]
    norm = torch.rand(512, generator=generator).to(device) + 0.5
    angle = torch.rand((701, 32), generator=generator).double() * 6
    rope = torch.stack((angle.cos(), angle.sin()), dim=-1).float().view(701, 64).to(device)
    store_window(rows, slots, positions, pool, norm_weight=norm, rope=rope, eps=EPS, impl=impl)
    kept = [i for i, slot in enumerate(slots.tolist()) if 0 < slot < 48]
    expected = norm_rope(rows[kept].double(), norm, positions[kept], rope)
    found = reference.load_entries(pool, slots[kept].long()).double()
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < {"fp32": 1e-6, "bf16": 3e-3, "fp8": 4e-2}[kv]
    untouched = sorted(set(range(48)) - set(slots[kept].tolist()))
    if kv == "fp8":
        assert (pool.data[0, :576] == 0xFF).all()
    else:
        assert pool.data[untouched].isnan().all()


@each_backend
def test_positions_outside_of_the_table_turn_to_zero(impl: str, device: str) -> None:
    pool = poisoned_pool(EntryLayout("fp32", 64, 16, 8), 2, device)
    rope = torch.ones((5, 16), device=device)
    positions = torch.tensor([-1, 4, 5, 2**31 - 1], dtype=torch.int32, device=device)
    store_window(
        torch.ones((4, 64), device=device),
        torch.arange(8, 12, device=device),
        positions,
        pool,
        norm_weight=torch.ones(64, device=device),
        rope=rope,
        impl=impl,
    )
    found = reference.load_entries(pool, torch.arange(8, 12, device=device))
    assert (found[:, :48] > 0.9).all()
    assert (found[:, 48:].abs().sum(dim=1) > 0).tolist() == [False, True, False, False]


@each_backend
def test_nan_stays_visible(impl: str, device: str) -> None:
    values = torch.ones((2, 512), device=device)
    values[0, 3] = values[0, 500] = torch.nan
    pools = {kv: poisoned_pool(EntryLayout(kv, 512, 64, 4), 2, device) for kv in ("bf16", "fp8")}
    for pool in pools.values():
        store_entries(values, torch.tensor([4, 5], device=device), pool, impl=impl)
        found = reference.load_entries(pool, torch.tensor([4, 5], device=device))
        assert found[0, 500].isnan()
        assert found[0, 3].isnan()
        assert not found[1].isnan().any()


@each_backend
def test_nothing_to_store(impl: str, device: str) -> None:
    pool = poisoned_pool(PACKED, 2, device)
    store_entries(
        torch.zeros((0, 512), device=device), torch.zeros(0, dtype=torch.int64, device=device), pool, impl=impl
    )
    assert (pool.data == 0xFF).all()


def test_hadamard_is_its_own_inverse() -> None:
    values = torch.randn((5, 32), generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose(reference.hadamard(reference.hadamard(values)), values)


REFUSALS = {
    "pool": (dict(pool=None), "pool: expected a EntryPool, got NoneType"),
    "columns": (dict(kv=torch.zeros(3, 256)), r"kv: expected 512 columns, got 256"),
    "dtype": (dict(kv=torch.zeros(3, 512, dtype=torch.float64)), "kv: expected dtype float32 or bfloat16, got float64"),
    "column stride": (dict(kv=torch.zeros(512, 3).T), r"kv: expected unit column stride .* got \[1, 3\]"),
    "row stride": (dict(kv=torch.zeros(3, 516)[:, :512]), r"kv: expected unit column stride and a row stride .* of 8"),
    "address": (dict(kv=torch.zeros(3 * 512 + 8)[1:1537].view(3, 512)), "kv: expected an address that is a multiple"),
    "slots": (dict(slots=torch.zeros(4, dtype=torch.int64)), "slots: expected 3 elements, got 4"),
    "positions": (dict(positions=torch.zeros(3)), "positions: expected dtype int32 or int64, got float32"),
    "norm": (dict(norm_weight=torch.ones(64)), r"norm_weight: expected a contiguous tensor of shape \[512\]"),
    "rope": (dict(rope=torch.ones(5, 32)), r"rope: expected a contiguous tensor of shape \['any', 64\]"),
    "no rope": (dict(rope=torch.ones(0, 64)), "rope: expected at least one position, got none"),
    "eps": (dict(eps=-1.0), "eps: expected a float of at least 0, got -1.0"),
    "impl": (dict(impl="cuda"), "impl: expected one of"),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_refusals(case: tuple[dict[str, object], str]) -> None:
    arguments: dict[str, object] = dict(
        kv=torch.zeros(3, 512),
        slots=torch.zeros(3, dtype=torch.int64),
        positions=torch.zeros(3, dtype=torch.int64),
        pool=EntryPool.empty(PACKED, 2),
        norm_weight=torch.ones(512),
        rope=torch.ones(5, 64),
    )
    with pytest.raises(ValueError, match=case[1]):
        store_window(**{**arguments, **case[0]})  # type: ignore[arg-type]
