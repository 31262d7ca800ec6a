"""Compression plans of a batch: one call for both ratios.

Which rows complete an entry, which rows are kept as state, and where: docs/plans.md. The semantics live in
`dsv4_backend.reference.planner`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dsv4_backend import dispatch
from dsv4_backend.geometry import RATIOS, CacheGeometry
from dsv4_backend.plans import DecodePlans, PrefillPlan, check_num_rows, check_ratios
from dsv4_backend.tables import RequestTables
from dsv4_backend.validation import INT_DTYPES, expect_range, expect_tensor, expect_type


def plan_prefill(
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    tables: RequestTables,
    geom: CacheGeometry,
    num_rows: int | None = None,
    ratios: Iterable[int] = RATIOS,
    impl: str = "auto",
    out: PrefillPlan | None = None,
) -> PrefillPlan:
    """Plans a batch in which request b adds its last `extend_lens[b]` tokens (prefill, chunked or not, and verify).

    Args:
        seq_lens: int32 or int64 [B], any stride. Length of each request once the batch is done (prefix + extend). Here
            verify lengths include the draft tokens.
        extend_lens: int32 or int64 [B], any stride. Rows of each request in the batch; 0 plans nothing for it.
        req_pool_indices: int32 or int64 [B], on the tables' device. Rows of `tables.req_to_token`.
        tables: where the tokens are.
        geom: cache geometry.
        num_rows: rows that each list has room for, at least the sum of the extend lengths (a padded bucket has more).
            None: that sum, which needs host lengths.
        ratios: a selection of (4, 128).
        impl: "auto" (Triton on a GPU, torch on a CPU), "triton" or "torch".
        out: buffers to write into, of exactly this `num_rows`, `ratios` and device; None allocates.

    Returns:
        `out`, or a new plan. Rows are in ascending (request, position) order and the same on every run.

    `seq_lens` and `extend_lens` are both on the host or both on the tables' device. Host lengths are checked here.
    Device lengths cannot be without a sync: a request whose length is out of range is planned as if its extend length
    were 0, one whose id is out of range as the reserved request 0, a batch with more than `num_rows` rows as if it had
    none; and `plan.check()` raises.

    Raises:
        ValueError: before anything is computed; the message says what was expected and what came.
    """
    ratios = check_ratios(ratios)
    batch_size = _check_requests(req_pool_indices, tables, geom)
    for name, lens in (("seq_lens", seq_lens), ("extend_lens", extend_lens)):
        expect_tensor(name, lens, dtypes=INT_DTYPES, ndim=1, size=batch_size)
    if seq_lens.device != extend_lens.device:
        raise ValueError(
            f"seq_lens and extend_lens: expected both on one device, got {seq_lens.device} and {extend_lens.device}"
        )
    if seq_lens.device.type == "cpu":
        num_rows = _check_host_lengths(seq_lens, extend_lens, tables, num_rows)
    elif seq_lens.device != tables.device:
        places = " or ".join(sorted({"cpu", str(tables.device)}))
        raise ValueError(f"seq_lens: expected a tensor on {places}, got one on {seq_lens.device}")
    elif num_rows is None:
        raise ValueError("num_rows: expected an int, since the lengths are on the device; got None")
    num_rows = check_num_rows(num_rows)
    _check_host_ids(req_pool_indices, tables)
    plan_fn = dispatch.planner(impl, tables.device).plan_prefill

    if out is None:
        out = PrefillPlan.empty(num_rows, ratios, tables.device)
    else:
        _check_out(out, PrefillPlan, num_rows, ratios, tables.device)
    if seq_lens.device != tables.device:
        seq_lens, extend_lens = torch.stack((seq_lens.long(), extend_lens.long())).to(tables.device).unbind()
    plan_fn(
        seq_lens=seq_lens,
        extend_lens=extend_lens,
        req_pool_indices=req_pool_indices,
        tables=tables,
        geom=geom,
        num_rows=num_rows,
        out=out,
    )
    return out


def plan_decode(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    tables: RequestTables,
    geom: CacheGeometry,
    ratios: Iterable[int] = RATIOS,
    impl: str = "auto",
    out: DecodePlans | None = None,
) -> DecodePlans:
    """Plans a batch with one new token a request; every request gets a row.

    Args:
        seq_lens: int32 or int64 [B], any stride, on the tables' device. Lengths that count the new token, at least 1.
        req_pool_indices: int32 or int64 [B], on the tables' device. Rows of `tables.req_to_token`.
        tables, geom, ratios, impl, out: as for `plan_prefill`.

    Tensors on a CPU are checked here. On a GPU a request whose id or length is out of range is planned as the padding
    request (request 0, length 1), and `plan.check()` raises.

    Returns:
        `out`, or a new plan, with the rows in the order of the requests.

    Raises:
        ValueError: before anything is computed; the message says what was expected and what came.
    """
    ratios = check_ratios(ratios)
    batch_size = _check_requests(req_pool_indices, tables, geom)
    expect_tensor("seq_lens", seq_lens, dtypes=INT_DTYPES, ndim=1, size=batch_size, device=tables.device)
    if seq_lens.device.type == "cpu":
        expect_range("seq_lens", seq_lens, 1, tables.max_seq_len, "columns of req_to_token")
    _check_host_ids(req_pool_indices, tables)
    plan_fn = dispatch.planner(impl, tables.device).plan_decode

    if out is None:
        out = DecodePlans.empty(batch_size, ratios, tables.device)
    else:
        _check_out(out, DecodePlans, batch_size, ratios, tables.device)
    plan_fn(seq_lens=seq_lens, req_pool_indices=req_pool_indices, tables=tables, geom=geom, out=out)
    return out


def _check_requests(req_pool_indices: torch.Tensor, tables: RequestTables, geom: CacheGeometry) -> int:
    expect_type("tables", tables, RequestTables)
    expect_type("geom", geom, CacheGeometry)
    geom.check_requests(tables.num_requests)
    expect_tensor("req_pool_indices", req_pool_indices, dtypes=INT_DTYPES, ndim=1, device=tables.device)
    return req_pool_indices.shape[0]


def _check_host_ids(req_pool_indices: torch.Tensor, tables: RequestTables) -> None:
    if req_pool_indices.device.type == "cpu":
        expect_range("req_pool_indices", req_pool_indices, 0, tables.num_requests - 1, "rows of req_to_token")


def _check_host_lengths(
    seq_lens: torch.Tensor, extend_lens: torch.Tensor, tables: RequestTables, num_rows: int | None
) -> int:
    """Checks lengths that lie on the host and returns the number of rows to plan for."""
    if tables.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"seq_lens: expected a tensor on {tables.device} while a CUDA graph is captured, got one on cpu, whose "
            "values a replay would not read again"
        )
    expect_range("seq_lens", seq_lens, 0, tables.max_seq_len, "columns of req_to_token")
    expect_range("extend_lens", extend_lens, 0, tables.max_seq_len, "columns of req_to_token")
    too_long = (extend_lens > seq_lens).nonzero()
    if len(too_long):
        b = int(too_long[0])
        raise ValueError(
            f"extend_lens[{b}]: expected at most seq_lens[{b}] = {int(seq_lens[b])}, got {int(extend_lens[b])}"
        )
    total = int(extend_lens.sum())
    if num_rows is None:
        return total
    if check_num_rows(num_rows) < total:
        raise ValueError(f"num_rows: expected at least the sum of extend_lens, {total}, got {num_rows}")
    return num_rows


def _check_out(
    out: PrefillPlan | DecodePlans,
    kind: type[PrefillPlan] | type[DecodePlans],
    num_rows: int,
    ratios: tuple[int, ...],
    device: torch.device,
) -> None:
    expect_type("out", out, kind)
    if out.ratios != tuple(sorted(ratios)):
        raise ValueError(f"out: expected a plan of the ratios {tuple(sorted(ratios))}, got one of {out.ratios}")
    if out.num_rows not in (None, num_rows):
        raise ValueError(f"out: expected a plan of {num_rows} rows, got one of {out.num_rows}")
    if out.device != device:
        raise ValueError(f"out: expected a plan on {device}, got one on {out.device}")
