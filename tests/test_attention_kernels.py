"""What holds for the attention kernels beside their results: splits, memory, large pools, graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from attention_harness import (
    FORMATS,
    Case,
    Lists,
    add_sink_and_rope,
    check_close,
    expected_results,
    make_case,
)
from backends import INTERPRET, each_compiled_backend, each_triton_backend
from dsv4_backend import EntryLayout, EntryPool, dispatch, store_entries
from dsv4_backend.attention import sparse_attention

each_format = pytest.mark.parametrize("kv", FORMATS)


@contextmanager
def empty_is_nan() -> Iterator[None]:
    """Tensors that nobody fills are full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_split(case: Case, impl: str, splits: int, lse: torch.Tensor | None = None) -> torch.Tensor:
    """The result with entries split over so many programs."""
    q, window, window_indices, window_lengths, *rest = case.arguments()
    compressed, compressed_indices, compressed_lengths = rest or (None, None, None)
    assert isinstance(q, torch.Tensor)
    out = torch.full_like(q, torch.nan)
    options = dict(sink=None, positions=None, rope=None, compressed_rows=None, scale=q.shape[2] ** -0.5) | case.options
    dispatch.attention(impl, q.device).sparse_attention(
        q=q,
        window=window,
        window_indices=window_indices,
        window_lengths=window_lengths,
        compressed=compressed,
        compressed_indices=compressed_indices,
        compressed_lengths=compressed_lengths,
        out=out,
        lse=lse,
        splits=splits,
        **options,
    )
    return out


def lists_of_all_lengths(columns: int, slots: int) -> Lists:
    """Rows without entries, with one, with one that lies alone behind others that do not count, and with all."""
    row = [1 + i % (slots - 1) for i in range(columns)]
    return Lists([row, row, [-1] * (columns - 1) + [5], row], [0, 1, columns, columns])


@each_triton_backend
@pytest.mark.parametrize("splits", [1, 3])
def test_lists_that_several_rows_share(impl: str, device: str, splits: int) -> None:
    """Also with numbers of lists that there are not: such a row has no compressed entries."""
    window = lists_of_all_lengths(20, 96)
    full = Lists([[1 + (7 * i + row) % 79 for i in range(40)] for row in range(4)], [40] * 4)
    case = add_sink_and_rope(make_case("fp32", device, heads=2, window=window, compressed=full))
    lists = case.compressed_list
    assert lists is not None
    for chosen, count in (([1, 1, 0, 1], 2), ([-1, 0, 1, 4], 4), ([0, -(2**31), 2**31 - 1, 0], 1), ([0, 0, 0, 0], 0)):
        known = [row if 0 <= row < count else None for row in chosen]
        own = Lists(
            [lists.slots[0 if row is None else row] for row in known],
            [0 if row is None else length for row, length in zip(known, lists.lengths, strict=True)],
        )
        expected = dataclasses.replace(case, compressed_list=own)
        rows = torch.tensor(chosen, dtype=torch.int32, device=device)
        shared = Shared(case.q, case.window, case.window_list, case.compressed, lists, {**case.options})
        shared.count, shared.options["compressed_rows"] = count, rows
        assert torch.equal(run_split(shared, impl, splits), run_split(expected, impl, splits))
        assert torch.equal(shared.run("torch"), expected.run("torch"))


class Shared(Case):
    """A case of which only the first `count` lists are given."""

    count: int

    def arguments(self) -> tuple[object, ...]:
        *others, indices, lengths = super().arguments()
        return *others, indices[: self.count], lengths  # type: ignore[index]


@each_triton_backend
@each_format
@pytest.mark.parametrize("splits", [1, 2, 3, 17] if INTERPRET else [1, 2, 3, 17, 64])
def test_splits_agree(impl: str, device: str, kv: str, splits: int) -> None:
    window, compressed = lists_of_all_lengths(70, 96), lists_of_all_lengths(90, 80)
    compressed = Lists(compressed.slots[::-1], compressed.lengths[::-1])
    case = add_sink_and_rope(make_case(kv, device, heads=2, window=window, compressed=compressed))
    lse = torch.full((4, 2), torch.nan, device=device)
    with empty_is_nan():
        found = run_split(case, impl, splits, lse)
    expected, log_sum = expected_results(case, **case.options)  # type: ignore[arg-type]
    check_close(found, expected, kv)
    assert torch.allclose(lse.double(), log_sum, rtol=1e-5, atol=1e-5)


@each_triton_backend
@each_format
def test_rows_without_entries_in_splits(impl: str, device: str, kv: str) -> None:
    window = Lists([[1, 2], [-1, -1], [1, 2]], [0, 2, 1])
    case = add_sink_and_rope(make_case(kv, device, heads=2, window=window, compressed=None))
    lse = torch.full((3, 2), torch.nan, device=device)
    with empty_is_nan():
        found = run_split(case, impl, 4, lse)
    assert not found[:2].any()
    assert (lse[:2] == -torch.inf).all()
    assert found[2].any(dim=-1).all()


@each_triton_backend
@each_format
def test_split_rows_do_not_depend_on_the_others(impl: str, device: str, kv: str) -> None:
    case = add_sink_and_rope(make_case(kv, device, heads=2, window=(3, 40), compressed=(3, 70)))
    found = run_split(case, impl, 3)
    for order in ([1, 2, 0], [2, 2, 2]):
        assert torch.equal(run_split(case.rows(order), impl, 3), found[order])


@each_triton_backend
def test_split_sinks(impl: str, device: str) -> None:
    sinks = torch.tensor([torch.inf, -torch.inf, 1e4, -1e4, 0.0, 30.0], device=device)
    case = make_case("fp32", device, heads=6, window=(2, 40), compressed=(2, 40))
    case.options = dict(sink=sinks)
    check_close(run_split(case, impl, 3), expected_results(case, sink=sinks)[0], "fp32")


def test_number_of_splits() -> None:
    kernels = pytest.importorskip("dsv4_triton_kernels.attention")
    # (rows, blocks of heads, blocks of entries, programs at a time)
    cases = {
        (1, 1, 20, 132): 20,
        (1, 1, 500, 132): 64,
        (1, 2, 500, 100): 50,
        (8, 2, 20, 132): 8,
        (66, 1, 20, 132): 2,
        (67, 1, 20, 132): 1,
        (4096, 1, 20, 132): 1,
        (1, 1, 0, 132): 1,
    }
    for arguments, splits in cases.items():
        assert kernels.num_splits(*arguments) == splits, arguments


@pytest.mark.parametrize("major", [8, 9, 10, 12])
def test_block_sizes(major: int) -> None:
    """Products need 16 heads and entries; shared memory holds queries and entries."""
    kernels = pytest.importorskip("dsv4_triton_kernels.attention")
    room = {9: 227, 10: 227}.get(major, 99) * 1024
    for kv in FORMATS:
        for dim in (16, 64, 128, 256, 512):
            for heads in (1, 3, 16, 17, 64, 128):
                sizes = kernels.block_sizes(kv, dim, heads, major)
                assert min(sizes["BLOCK_H"], sizes["BLOCK_N"]) >= 16
                width = dim * (4 if kv == "fp32" else 2)
                assert width * (sizes["BLOCK_H"] + sizes["STAGES"] * sizes["BLOCK_N"]) <= room


@pytest.mark.skipif(INTERPRET, reason="interpreted kernels have no signature")
def test_constants_are_in_the_order_of_the_signature() -> None:
    """From the second launch on they are passed by position."""
    attend = pytest.importorskip("dsv4_triton_kernels.attention_attend")
    kernels = pytest.importorskip("dsv4_triton_kernels.attention")
    layout = EntryLayout("fp8", 512, 64, 64)
    for kv in FORMATS:
        for dim, heads in ((64, 3), (512, 3), (512, 64)):
            sizes = kernels.block_sizes(kv, dim, heads, 9)
            names = [name for name in (*attend.entry_constants(layout, None), *sizes, "PDL") if name != "num_warps"]
            assert attend._attend_entries_kernel.arg_names[-len(names) :] == names


def model_case(kv: str, device: str, rows: int, heads: int = 64) -> Case:
    lists = [Lists([[1 + (7 * i + row) % 79 for i in range(n)] for row in range(rows)], [n] * rows) for n in (128, 512)]
    return add_sink_and_rope(
        make_case(kv, device, head_dim=512, heads=heads, window=lists[0], compressed=lists[1], rope=64)
    )


@each_compiled_backend
@each_format
@pytest.mark.parametrize("rows", [1, 8, 40, 140])
def test_model_shapes(impl: str, device: str, kv: str, rows: int) -> None:
    model_case(kv, device, rows).check(impl)


@each_compiled_backend
@each_format
@pytest.mark.parametrize("rows", [1, 200])
def test_memory_is_result_and_workspace(impl: str, device: str, kv: str, rows: int) -> None:
    case = model_case(kv, device, rows)
    arguments, out = case.arguments(), torch.empty_like(case.q)

    def run() -> None:
        sparse_attention(*arguments, out=out, impl=impl, **case.options)  # type: ignore[arg-type]

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    used = torch.cuda.max_memory_allocated() - before
    # A workspace for each program that runs at a time, at most.
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    assert used == 0 if rows == 200 else 0 < used <= programs * 64 * 513 * 4 + 512


@each_compiled_backend
@each_format
@pytest.mark.parametrize("rows", [2, 150])
def test_graph_replay(impl: str, device: str, kv: str, rows: int) -> None:
    """A graph follows lists, lengths, queries and pools, and gives the bits of an eager call."""
    case = model_case(kv, device, rows, heads=16)
    q, window, window_indices, window_lengths, compressed, indices, lengths = case.arguments()
    inputs = [q, window_indices, window_lengths, indices, lengths]
    out = torch.empty_like(case.q)

    def run(out: torch.Tensor | None = None) -> torch.Tensor:
        return sparse_attention(
            q, window, window_indices, window_lengths, compressed, indices, lengths, out=out, impl=impl, **case.options
        )  # type: ignore[arg-type]

    run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        order = torch.randperm(rows, generator=generator).to(device)
        for tensor in inputs:
            assert isinstance(tensor, torch.Tensor)
            tensor.copy_(tensor[order])
        window_lengths.copy_(torch.randint(0, 129, (rows,), generator=generator))  # type: ignore[attr-defined]
        lengths.copy_(torch.randint(0, 513, (rows,), generator=generator))  # type: ignore[attr-defined]
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, run())


@each_compiled_backend
@pytest.mark.parametrize(("kv", "num_slots"), [("bf16", 2**22 + 64), ("fp8", 2**22 + 64)], ids=["bf16", "fp8"])
def test_pools_of_more_than_2_gib(impl: str, device: str, kv: str, num_slots: int) -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("expected 20 GiB of free memory")
    far = Lists([[1, num_slots - 1, num_slots - 2, num_slots, 2**21 + 3]], [5])
    generator = torch.Generator().manual_seed(0)
    pools = []
    for page in (64, 32):
        pool = EntryPool.empty(EntryLayout(kv, 512, 64, page), num_slots // page, device)
        slots = torch.tensor(far.live(0, num_slots), device=device)
        store_entries(torch.randn((len(slots), 512), generator=generator).to(device), slots, pool, impl="torch")
        pools.append(pool)
    q = torch.randn((1, 64, 512), generator=generator).to(device, torch.bfloat16)
    Case(q, pools[0], far, pools[1], far).check(impl)
