"""Attention over index lists, against results computed row by row; what no list names is NaN everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_harness import (
    FORMATS,
    INT_MAX,
    INT_MIN,
    POISON,
    Lists,
    add_sink_and_rope,
    expected_results,
    make_case,
    random_list,
    turn,
)
from backends import INTERPRET, each_backend, each_fast_backend, repeats
from dsv4_backend import EntryPool
from dsv4_backend.attention import sparse_attention

each_format = pytest.mark.parametrize("kv", FORMATS)
ROWS = 2 if INTERPRET else 5


@each_backend
@each_format
@pytest.mark.parametrize("heads", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 512])
def test_heads_and_dimensions(impl: str, device: str, kv: str, heads: int, head_dim: int) -> None:
    rows = 1 if INTERPRET and heads > 16 else ROWS
    case = make_case(kv, device, head_dim=head_dim, heads=heads, window=(rows, 40), compressed=(rows, 75))
    add_sink_and_rope(case).check(impl)


@each_backend
@pytest.mark.parametrize(
    ("kv", "head_dim", "rope"),
    [("fp32", 16, 2), ("bf16", 16, 16), ("fp32", 128, 30), ("bf16", 256, 64), ("fp8", 256, 128), ("fp8", 512, 256)],
    ids=["fp32-16-2", "bf16-16-16", "fp32-128-30", "bf16-256-64", "fp8-256-128", "fp8-512-256"],
)
def test_other_dimensions(impl: str, device: str, kv: str, head_dim: int, rope: int) -> None:
    add_sink_and_rope(make_case(kv, device, head_dim=head_dim, heads=2, rope=rope)).check(impl)


@each_backend
@pytest.mark.parametrize(
    ("kv", "dtype"), [("fp32", torch.bfloat16), ("bf16", torch.float32), ("fp8", torch.float32)], ids=FORMATS
)
def test_other_query_dtypes(impl: str, device: str, kv: str, dtype: torch.dtype) -> None:
    found = add_sink_and_rope(make_case(kv, device, dtype=dtype)).check(impl)
    assert found.dtype == dtype


@each_backend
@each_format
def test_window_alone(impl: str, device: str, kv: str) -> None:
    add_sink_and_rope(make_case(kv, device, window=(4, 70), compressed=None)).check(impl)


@each_fast_backend
@each_format
def test_many_rows(impl: str, device: str, kv: str) -> None:
    case = make_case(kv, device, head_dim=512, heads=64, window=(150, 128), compressed=(150, 37))
    add_sink_and_rope(case).check(impl)


@each_backend
@each_format
def test_odd_lists(impl: str, device: str, kv: str) -> None:
    """A row of each kind; 96 window slots and 80 compressed ones."""
    window = {
        "nothing counts": ([1, 2, 3, 4, 5], 0),
        "negative length": ([1, 2, 3, 4, 5], -7),
        "least length": ([1, 2, 3, 4, 5], INT_MIN),
        "largest length": ([6, 7, 8, 9, 10], INT_MAX),
        "all invalid": ([-1, INT_MIN, 96, INT_MAX, -2], 5),
        "gaps": ([-1, 11, INT_MIN, 12, -1], 5),
        "beyond the pool": ([96, 13, 97, INT_MAX, 95], 5),
        "duplicates": ([14, 14, 14, 15, 14], 5),
        "one entry": ([16, 1, 1, 1, 1], 1),
        "one entry at the end": ([-1, -1, -1, -1, 17], 5),
    }
    compressed = {
        "nothing counts": ([1, 2, 3], 0),
        "negative length": ([4, 5, 6], 3),
        "least length": ([4, 5, 6], INT_MIN),
        "largest length": ([7, 8, 9], INT_MAX),
        "all invalid": ([-1, 80, INT_MIN], 3),
        "gaps": ([10, -1, 11], 3),
        "beyond the pool": ([80, 79, 81], 3),
        "duplicates": ([12, 12, 12], 2),
        "one entry": ([1, 1, 1], 0),
        "one entry at the end": ([1, 1, 1], -1),
    }
    lists = [
        Lists([slots for slots, _ in rows.values()], [n for _, n in rows.values()]) for rows in (window, compressed)
    ]
    case = make_case(kv, device, window=lists[0], compressed=lists[1])
    found = case.check(impl)
    kinds = list(window)
    for kind in ("nothing counts", "least length", "all invalid"):
        assert not found[kinds.index(kind)].any()
    # A single entry is the result, bit by bit.
    for kind in ("one entry", "one entry at the end"):
        row = kinds.index(kind)
        assert torch.equal(found[row], expected_results(case)[0][row].to(found.dtype))
    add_sink_and_rope(case).check(impl)


@each_backend
@each_format
@pytest.mark.parametrize("columns", [(0, 5), (5, 0), (0, 0), (1, 1)], ids=str)
def test_few_columns(impl: str, device: str, kv: str, columns: tuple[int, int]) -> None:
    case = make_case(kv, device, window=(3, columns[0]), compressed=(3, columns[1]), wild=0)
    found = add_sink_and_rope(case).check(impl)
    if columns == (0, 0):
        assert not found.any()


@each_backend
@each_format
def test_no_rows(impl: str, device: str, kv: str) -> None:
    found = make_case(kv, device, window=(0, 5), compressed=(0, 4)).run(impl, lse=torch.empty((0, 3), device=device))
    assert found.shape[0] == 0


@each_backend
@each_format
def test_sinks(impl: str, device: str, kv: str) -> None:
    lists = Lists([[1, 2, 3, 4], [-1, -1, -1, -1], [5, 6, 7, 8]], [4, 4, 4])
    sinks = [torch.inf, -torch.inf, 1e4, -1e4, 0.0, 30.0, -30.0]
    case = make_case(kv, device, heads=len(sinks), window=lists)
    found = case.check(impl, sink=torch.tensor(sinks, device=device))
    assert not found[:, 0].any()
    assert not found[:, 2].any()
    plain = case.check(impl)
    assert torch.equal(found[:, 1], plain[:, 1])
    assert torch.equal(found[:, 3], plain[:, 3])


@each_backend
@each_format
@pytest.mark.parametrize("sign", [1, -1], ids=["high", "low"])
def test_logits_far_from_zero(impl: str, device: str, kv: str, sign: int) -> None:
    """Sinks beside logits of thousands: the differences count, and nothing overflows."""
    # The first channel of each entry is 1, so that the query's first channel moves all logits.
    case = make_case(kv, device, window=(3, 9), compressed=(3, 9), wild=0, first_channel=1.0)
    case.q[..., 0] = sign * 65536.0
    level = sign * 65536.0 * case.q.shape[2] ** -0.5
    sink = torch.tensor([level, level - 3, level + 3], device=device)
    lse = torch.empty(case.q.shape[:2], device=device)
    found = case.run(impl, sink=sink, lse=lse)
    expected, log_sum = expected_results(case, sink=sink)
    # Float32 logits of this size are multiples of 1e-3.
    assert torch.allclose(lse.double(), log_sum, rtol=0, atol=0.02)
    error, size = (found.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    assert (error <= 0.03 * size).all()


def _first_channels(pool: EntryPool) -> torch.Tensor:
    """Byte of each slot's first channel in an fp8 pool."""
    slot, layout = torch.arange(pool.num_slots, device=pool.device), pool.layout
    return slot // layout.page_entries * layout.page_bytes + slot % layout.page_entries * layout.row_bytes


def _first_scales(pool: EntryPool) -> torch.Tensor:
    slot, layout = torch.arange(pool.num_slots, device=pool.device), pool.layout
    page = slot // layout.page_entries * layout.page_bytes
    return page + layout.page_entries * layout.row_bytes + slot % layout.page_entries * 8


@each_backend
def test_scale(impl: str, device: str) -> None:
    case = make_case("fp32", device)
    assert not torch.equal(case.check(impl, scale=0.5), case.check(impl, scale=0.01))
    assert torch.equal(case.run(impl), case.run(impl, scale=64**-0.5))


@each_backend
@each_format
def test_logarithms_are_without_sink(impl: str, device: str, kv: str) -> None:
    case = make_case(kv, device)
    sums = [torch.empty((3, 3), device=device) for _ in range(2)]
    case.run(impl, lse=sums[0])
    case.run(impl, lse=sums[1], sink=torch.full((3,), 5.0, device=device))
    assert torch.equal(*sums)


@each_backend
@each_format
def test_inverse_rope(impl: str, device: str, kv: str) -> None:
    case = add_sink_and_rope(make_case(kv, device, dtype=torch.float32))
    positions, rope = (case.options.pop(name) for name in ("positions", "rope"))
    plain, turned = case.run(impl), case.run(impl, positions=positions, rope=rope)
    assert torch.allclose(turn(turned, 1, positions, rope), plain.double(), rtol=0, atol=1e-5)  # type: ignore[arg-type]
    start = plain.shape[2] - case.window.layout.rope_dim
    assert torch.equal(turned[..., :start], plain[..., :start])


@each_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_positions_outside_of_the_table(impl: str, device: str, dtype: torch.dtype) -> None:
    lists = Lists([[1, 2, 3]] * 5, [3] * 5)
    case = add_sink_and_rope(make_case("fp32", device, window=lists, compressed=None))
    wild = [-1, 49, 50, INT_MIN, INT_MAX]
    found = case.run(impl, positions=torch.tensor(wild, dtype=dtype, device=device))
    plain = case.run(impl, positions=None, rope=None)
    start = plain.shape[2] - case.window.layout.rope_dim
    assert torch.equal(found[..., :start], plain[..., :start])
    assert not found[[0, 2, 3, 4], :, start:].any()
    assert found[1, :, start:].all()


@each_backend
@each_format
def test_slot_zero_counts_like_any_other(impl: str, device: str, kv: str) -> None:
    """Only storing leaves it out: padding rows read it."""
    case = make_case(kv, device, window=Lists([[0, 1], [0, 0]], [2, 1]), compressed=None)
    case.window.data[0] = 0
    case.check(impl)


@each_backend
@each_format
def test_what_no_list_names_changes_nothing(impl: str, device: str, kv: str) -> None:
    case = add_sink_and_rope(make_case(kv, device))
    found = case.run(impl)
    for pool, part in ((case.window, case.window_list), (case.compressed, case.compressed_list)):
        assert pool is not None
        assert part is not None
        other = EntryPool.empty(pool.layout, pool.num_slots // pool.layout.page_entries, device)
        named = sorted({slot for row in range(3) for slot in part.live(row, pool.num_slots)})
        kept = _bytes_of(pool, named)
        other.data.view(torch.uint8).view(-1)[kept] = pool.data.view(torch.uint8).view(-1)[kept]
        pool.data.copy_(other.data)
    assert torch.equal(case.run(impl), found)


def _bytes_of(pool: EntryPool, slots: list[int]) -> torch.Tensor:
    """Places of all bytes of entries."""
    layout, slot = pool.layout, torch.tensor(slots, device=pool.device)
    if layout.format != "fp8":
        return (slot[:, None] * layout.row_bytes + torch.arange(layout.row_bytes, device=pool.device)).flatten()
    data, scales = _first_channels(pool)[slot], _first_scales(pool)[slot]
    parts = [
        (start[:, None] + torch.arange(size, device=pool.device)).flatten()
        for start, size in ((data, layout.row_bytes), (scales, 8))
    ]
    return torch.cat(parts)


@each_backend
@each_format
def test_tensors_that_are_not_contiguous(impl: str, device: str, kv: str) -> None:
    case = add_sink_and_rope(make_case(kv, device))
    plain, (rows, heads, dim) = case.run(impl), case.q.shape
    wide = torch.full((rows, heads + 2, dim + 8), torch.nan, dtype=case.q.dtype, device=device)
    place = wide[:, 1 : 1 + heads, 8:]
    place.copy_(case.q)
    case.q = place
    base = torch.full((rows + 1, heads + 1, dim + 16), 7.0, dtype=plain.dtype, device=device)
    out = base[1:, :heads, 8 : 8 + dim]
    assert case.run(impl, out=out) is out
    # Torch may add up in another order.
    assert torch.allclose(out, plain, rtol=0 if impl == "triton" else 1e-2, atol=0)
    out.fill_(7.0)
    assert (base == 7.0).all()


@each_backend
def test_rows_of_indices_may_be_one_and_the_same(impl: str, device: str) -> None:
    lists = Lists([[3, 4, 5, 6]] * 3, [4, 2, 1])
    case = make_case("fp32", device, window=lists, compressed=None)
    q, window, indices, lengths = case.arguments()
    once = indices[:1].expand(3, 4)  # type: ignore[index]
    found = sparse_attention(q, window, once, lengths, impl=impl)  # type: ignore[arg-type]
    assert torch.equal(found, case.run(impl))


@each_backend
@each_format
def test_a_row_does_not_depend_on_the_others(impl: str, device: str, kv: str) -> None:
    rows = 4
    case = add_sink_and_rope(make_case(kv, device, window=(rows, 20), compressed=(rows, 45)))
    found = case.run(impl)
    # Kernels add up in one order; torch's products may not.
    tolerance = 0 if impl == "triton" else 1e-5 if kv == "fp32" else 2e-2
    for order in ([2, 3, 0, 1], [1, 1, 1, 1], [3, 2, 2, 0]):
        assert torch.allclose(case.rows(order).run(impl).float(), found[order].float(), rtol=0, atol=tolerance)


@each_backend
@each_format
def test_equal_calls_are_equal_bit_by_bit(impl: str, device: str, kv: str) -> None:
    case = add_sink_and_rope(make_case(kv, device, heads=16, window=(2, 40), compressed=(2, 60)))
    found = case.run(impl)
    for _ in range(repeats(impl, device, on_gpu=20, on_cpu=20) - 1):
        assert torch.equal(case.run(impl), found)


@each_backend
def test_nan_in_a_query_stays_in_its_head(impl: str, device: str) -> None:
    case = make_case("fp32", device, window=Lists([[1, 2], [3, 4]], [2, 0]), compressed=None)
    case.q[:, 1, 3] = torch.nan
    found = case.run(impl)
    assert found[0, 1].isnan().all()
    assert found[0, [0, 2]].isfinite().all()
    assert not found[1].any()


@each_backend
@each_format
@settings(max_examples=6 if INTERPRET else 40)
@given(data=st.data())
def test_any_lists(impl: str, device: str, kv: str, data: st.DataObject) -> None:
    draw = data.draw
    rows, seed = draw(st.integers(1, 3)), draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    lists: list[Lists | None] = []
    for num_slots in (96, 80):
        columns = draw(st.sampled_from((0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 90)))
        part = random_list(rows, columns, num_slots, generator, wild=draw(st.sampled_from((0.0, 0.3, 0.9))))
        length = st.one_of(st.integers(0, columns + 1), st.sampled_from((INT_MIN, -1, columns, INT_MAX)))
        lists.append(Lists(part.slots, draw(st.lists(length, min_size=rows, max_size=rows))))
    if draw(st.booleans()):
        lists[1] = None
    assert lists[0] is not None
    case = make_case(
        kv, device, heads=draw(st.sampled_from((1, 2, 17))), window=lists[0], compressed=lists[1], seed=seed
    )
    if draw(st.booleans()):
        add_sink_and_rope(case, seed)
    case.check(impl)


@each_format
def test_poison_is_nan(kv: str) -> None:
    """What the cases above rely on."""
    case = make_case(kv, "cpu", window=Lists([[1]], [1]), compressed=None)
    case.window.data.view(torch.uint8).fill_(POISON)
    assert case.run("torch").isnan().all()
