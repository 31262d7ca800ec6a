"""Launches of compression: pooling, norm, rope, quantisation and storing of entries, and the rows kept as state.

Every value of a `kv_score` row is read by exactly one entry, so nothing is gained by sharing rows between programs:
what counts is that enough bytes are on their way. Ratio 4 is one launch of a program an entry (8 rows of its half of
the channels, all loaded before the first is used). Ratio 128 splits the channels of an entry between programs, since
one could not load its 128 rows fast enough; a second launch finishes the entries.

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
from dsv4_triton_kernels.compressor_c128 import _finish_step_kernel, _pool_c128_kernel
from dsv4_triton_kernels.kv_store import INTERPRET_ROWS, pool_args, pool_constants

PACKED_MAX_ROWS = 65_536

_launch_c4 = Launcher(_compress_c4_kernel)
_launch_pool = Launcher(_pool_c128_kernel)
_launch_finish = Launcher(_finish_step_kernel)

# What serves entries of so many channels. Ratio 4: entries and warps of a program; a warp loads 128 channels of a row
# at a time, four a thread.
C4_ROWS = {512: dict(ROWS=1, num_warps=4), 256: dict(ROWS=1, num_warps=2), 128: dict(ROWS=1, num_warps=1)}
# Ratio 128: channels of a pooling program and requests that it looks at in the decode form, and its warps.
POOL_PARTS = dict(PART=32, SCAN=8, num_warps=4)
FINISH_ROWS = {512: dict(ROWS=1, num_warps=4), 256: dict(ROWS=1, num_warps=4)}
SMALL_ROWS = dict(ROWS=4, num_warps=4)
# Programs at most: enough to fill the largest chip, so that a program keeps the bias for several entries.
POOL_PROGRAMS = 528
WRITE_PROGRAMS = 1024
# Lists are longer than what they hold: programs for one entry in so many rows of a step, but at least so many.
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
    """Two launches, or one for ratio 4 in the decode form; arguments as in `dsv4_backend.compressor.compress`."""
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
    if ratio == 4:
        _compress_c4(kv, (words, num_rows), (out_loc, bias, *end), key, pool)
        if form != "decode":
            finish = (words, write, 0, num_rows, state, out_loc, *end)
            _finish(0, num_rows, kv, finish, (*key, False), pool, 4)
        return
    pooled = torch.empty((capacity, pool.layout.head_dim), dtype=torch.float32, device=pool.device)
    _pool_c128(kv, (words, capacity, bias, pooled), capacity, num_rows, (form, pool.layout.head_dim), pool)
    finish = (words, write, capacity, num_rows, pooled, out_loc, *end)
    writes = 0 if form == "decode" else num_rows
    _finish(_entry_programs(form, 128, num_rows), writes, kv, finish, (*key, True), pool, 2)


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
    programs = -(-_entry_programs(key[0], 4, plan[-1]) // sizes["ROWS"])
    _launch_c4(
        pool.device,
        key,
        (programs,),
        (*kv, *plan, *rest),
        lambda: dict(FORM=key[0], **pool_constants(pool.layout), **sizes, **pdl_options(pool.device)),
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
    sizes = dict(POOL_PARTS)
    sizes["PART"] = head_dim if INTERPRET else min(head_dim, sizes["PART"])
    parts = head_dim // sizes["PART"]
    if form == "decode":
        programs = -(-num_rows // sizes["SCAN"])
    else:
        programs = min(_entry_programs(form, 128, num_rows), max(1, POOL_PROGRAMS // parts))
    _launch_pool(
        pool.device,
        key,
        (parts, programs),
        (*kv, *plan),
        lambda: dict(FORM=form, D=head_dim, **sizes, **pdl_options(pool.device)),
    )


def _finish(
    entries: int,
    writes: int,
    kv: tuple[Any, ...],
    rest: tuple[Any, ...],
    key: tuple[Any, ...],
    pool: Any,
    parts: int,
) -> None:
    head_dim = pool.layout.head_dim
    sizes = dict(FINISH_ROWS.get(head_dim, SMALL_ROWS))
    if INTERPRET:
        sizes["ROWS"] = INTERPRET_ROWS
    entry_programs = -(-entries // sizes["ROWS"])
    most_writers = INTERPRET_PROGRAMS if INTERPRET else WRITE_PROGRAMS
    programs = entry_programs + min(most_writers, -(-writes // sizes["ROWS"]))
    _launch_finish(
        pool.device,
        key,
        (programs,),
        (entry_programs, *kv, *rest),
        lambda: dict(
            FORM=key[0],
            ENTRIES=key[-1],
            WIDTH=parts * head_dim,
            **pool_constants(pool.layout),
            **sizes,
            **pdl_options(pool.device),
        ),
    )
