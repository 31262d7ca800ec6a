"""Launches of compression: pooling, norm, rope, quantisation and storing of entries, and the rows kept as state.

Every value of a `kv_score` row is read by exactly one entry, so nothing is gained by sharing rows between programs:
what counts is that enough bytes are on their way. Ratio 4 is one launch of a program an entry (8 rows of its half of
the channels, all loaded before the first is used). So is ratio 128 where there are many entries. A few of them split
their channels between programs, since one could not load 128 rows fast enough; a second launch finishes them.

State that a step keeps may take the ring row of state that the step reads, at a distance of a whole ring. In the
prefill form the write is therefore in the second launch, which waits for the end of the first. In the decode form no
row that is written is read: a request reads the rows of the w - 1 positions before its new token, which lie in other
ring rows than the new one (a ring has at least w rows), on window pages and in request rings that no other request
writes; and the new row itself is taken from `kv_score`.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4_triton_kernels.common import INTERPRET, Launcher, pdl_options
from dsv4_triton_kernels.compressor_c4 import _compress_c4_kernel
from dsv4_triton_kernels.compressor_c128 import _compress_c128_kernel, _finish_step_kernel, _pool_c128_kernel
from dsv4_triton_kernels.kv_store import INTERPRET_ROWS, pool_args, pool_constants

PACKED_MAX_ROWS = 65_536

_launch_c4 = Launcher(_compress_c4_kernel)
_launch_c128 = Launcher(_compress_c128_kernel)
_launch_pool = Launcher(_pool_c128_kernel)
_launch_finish = Launcher(_finish_step_kernel)

# What serves entries of so many channels, measured on an H200. Ratio 4: entries and warps of a program; a warp loads
# 128 channels of a row at a time, four a thread.
C4_ROWS = {512: dict(ROWS=1, num_warps=4), 256: dict(ROWS=1, num_warps=2), 128: dict(ROWS=1, num_warps=1)}
SMALL_ROWS = dict(ROWS=4, num_warps=4)
# Programs at most, which take turns: two waves.
C4_PROGRAMS = {512: 1056}
# Ratio 128, many entries: tokens side by side, stages of the loop, warps. From so many entries on they fill a chip.
C128_WHOLE = dict(LANES=2, STAGES=3, num_warps=4)
C128_MANY = 256
# Fewer entries: channels of a pooling program; and requests that programs of the decode form look at together. So many
# programs share these, or fewer, for all of them to be about DECODE_POOL_PROGRAMS.
POOL_PARTS = dict(PART=32, LANES=16, STAGES=3, SCAN=1, num_warps=1)
DECODE_POOL_PARTS = dict(PART=32, LANES=32, STAGES=3, SCAN=32, num_warps=4)
DECODE_POOL_PROGRAMS = 24
MOST_SHARE = 8
# Entries of a program of the second launch, rows of state that one has on their way where there are many, warps.
FINISH_ROWS = {
    512: dict(ROWS=1, WRITE_ROWS=4, num_warps=4),
    256: dict(ROWS=1, WRITE_ROWS=4, num_warps=4),
    128: dict(ROWS=1, WRITE_ROWS=1, num_warps=4),
}
FINISH_SMALL_ROWS = dict(ROWS=4, WRITE_ROWS=16, num_warps=4)
# Write lists are mostly empty, but may be full: a program for so many rows of a step, within bounds; each row has one
# of its own in a step of up to FEW_WRITES.
WRITE_PART = 32
WRITE_PROGRAMS = 264
FEW_WRITES = 528
# Compress lists are longer than what they hold: programs for one entry in so many rows of a step, but at least so many.
FEW_ROWS = 1024
# In the interpreter programs run one after the other: a few, which take turns.
INTERPRET_PROGRAMS = 4


def compress(
    *,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    plans: Any,
    ratio: int,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rope: torch.Tensor,
    out_loc: torch.Tensor,
    pool: Any,
) -> None:
    """Two launches; one for ratio 4 in the decode form. Arguments as in `dsv4_backend.compressor.compress`."""
    plan, num_rows = plans.ratio(ratio), plans.num_rows
    if num_rows == 0 or kv_score.shape[0] == 0:
        return
    capacity = num_rows
    if hasattr(plan, "rows"):
        form, words, write = "decode", plan.words, plan.words
    else:
        form = "packed" if num_rows <= PACKED_MAX_ROWS else "wide"
        words, write = plan.compress_words, plan.write_words
        # Each request, and so each ring, closes at most one entry more than its rows alone would.
        capacity = min(num_rows, num_rows // ratio + state.shape[0] // ratio + 1)
    kv = (kv_score, kv_score.stride(0) // 4, kv_score.shape[0], state, state.shape[0])
    end = (norm_weight, eps, rope, rope.shape[0], *pool_args(pool))
    key = (form, pool.layout, pool.num_slots > 2**31 - 1)
    whole = ratio == 4 or (form != "decode" and num_rows >= 128 * C128_MANY)
    if ratio == 4:
        header = words if form == "decode" else plans.header
        _compress_c4(kv, (words, num_rows, header), (out_loc, bias, *end), key, pool)
    elif whole:
        _compress_c128(kv, (words, capacity), (out_loc, bias, *end), num_rows, key, pool)
    if whole:
        if form != "decode":
            _finish(0, num_rows, kv, (words, write, 0, num_rows, state, out_loc, *end), (*key, False), pool)
        return
    pooled = torch.empty((capacity, pool.layout.head_dim), dtype=torch.float32, device=pool.device)
    _pool_c128(kv, (words, capacity, bias, pooled), capacity, num_rows, (form, pool.layout.head_dim), pool)
    finish = (words, write, capacity, num_rows, pooled, out_loc, *end)
    writes = 0 if form == "decode" else num_rows
    _finish(_entry_programs(form, 128, num_rows), writes, kv, finish, (*key, True), pool)


def _entry_programs(form: str, ratio: int, num_rows: int) -> int:
    """Entries that get a program of their own. Further ones, where there are many short requests, share them."""
    if form == "decode":
        return num_rows
    wanted = max(min(num_rows, FEW_ROWS // (ratio // 4)), -(-num_rows // ratio))
    return min(wanted, INTERPRET_PROGRAMS * INTERPRET_ROWS) if INTERPRET else wanted


def _compress_c4(
    kv: tuple[Any, ...], plan: tuple[Any, ...], rest: tuple[Any, ...], key: tuple[Any, ...], pool: Any
) -> None:
    sizes = dict(C4_ROWS.get(pool.layout.head_dim, SMALL_ROWS))
    if INTERPRET:
        sizes["ROWS"] = INTERPRET_ROWS
    programs = -(-_entry_programs(key[0], 4, plan[1]) // sizes["ROWS"])
    if key[0] != "decode":
        programs = min(programs, C4_PROGRAMS.get(pool.layout.head_dim, 1 << 30))
    _launch_c4(
        pool.device,
        key,
        (programs,),
        (*kv, *plan, *rest),
        lambda: dict(FORM=key[0], **pool_constants(pool.layout), **sizes, **pdl_options(pool.device)),
    )


def _compress_c128(
    kv: tuple[Any, ...],
    plan: tuple[Any, ...],
    rest: tuple[Any, ...],
    num_rows: int,
    key: tuple[Any, ...],
    pool: Any,
) -> None:
    _launch_c128(
        pool.device,
        key,
        (_entry_programs(key[0], 128, num_rows),),
        (*kv, *plan, *rest),
        lambda: dict(FORM=key[0], **pool_constants(pool.layout), **C128_WHOLE, **pdl_options(pool.device)),
    )


def _pool_c128(
    kv: tuple[Any, ...],
    plan: tuple[Any, ...],
    capacity: int,
    num_rows: int,
    key: tuple[Any, ...],
    pool: Any,
) -> None:
    form, head_dim = key
    sizes = dict(DECODE_POOL_PARTS if form == "decode" else POOL_PARTS)
    sizes["PART"] = head_dim if INTERPRET else min(head_dim, sizes["PART"])
    parts = head_dim // sizes["PART"]
    if form == "decode":
        scans = -(-num_rows // sizes["SCAN"])
        share = max(1, min(MOST_SHARE, DECODE_POOL_PROGRAMS // scans))
        programs = scans * share
    else:
        share, programs = 1, _entry_programs(form, 128, num_rows)
    _launch_pool(
        pool.device,
        key,
        (parts, programs),
        (*kv, *plan, share),
        lambda: dict(FORM=form, D=head_dim, **sizes, **pdl_options(pool.device)),
    )


def _write_programs(num_rows: int, write_rows: int) -> int:
    if INTERPRET:
        return min(INTERPRET_PROGRAMS, -(-num_rows // write_rows))
    return num_rows if num_rows <= FEW_WRITES else min(WRITE_PROGRAMS, num_rows // WRITE_PART)


def _finish(
    entries: int,
    writes: int,
    kv: tuple[Any, ...],
    rest: tuple[Any, ...],
    key: tuple[Any, ...],
    pool: Any,
) -> None:
    head_dim, width = pool.layout.head_dim, kv[3].shape[1]
    sizes = dict(FINISH_ROWS.get(head_dim, FINISH_SMALL_ROWS))
    if writes <= FEW_WRITES:
        sizes["WRITE_ROWS"] = 1
    if INTERPRET:
        sizes["ROWS"] = sizes["WRITE_ROWS"] = INTERPRET_ROWS
    entry_programs = -(-entries // sizes["ROWS"])
    programs = entry_programs + _write_programs(writes, sizes["WRITE_ROWS"])
    _launch_finish(
        pool.device,
        (*key, width, sizes["WRITE_ROWS"]),
        (programs,),
        (entry_programs, *kv, *rest),
        lambda: dict(
            FORM=key[0],
            ENTRIES=key[-1],
            WIDTH=width,
            **pool_constants(pool.layout),
            **sizes,
            **pdl_options(pool.device),
        ),
    )
