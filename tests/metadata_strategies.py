"""Settings and steps, drawn by Hypothesis: every mode, lengths around every border, tensors in every legal layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from backends import INTERPRET
from dsv4_backend import CacheGeometry, ForwardMode
from metadata_steps import GEOM, MODES, Setting, Step
from strategies import INT_DTYPES, LAYOUTS, Pool, near_edges, pools

MOST_REQUESTS, MOST_ROWS = (4, 40) if INTERPRET else (7, 150)
EXAMPLES = 8 if INTERPRET else 60
"""Of a property. The interpreter takes a third of a second for one."""

COMPILED = torch.cuda.is_available() and not INTERPRET
"""A GPU compiles a kernel for each choice of sizes and dtypes; there, properties draw from a few."""

SMALL_PAGES = CacheGeometry(page_size=128, swa_page_size=64, window=16, c4_ring=16, c128_ring=256)
LARGE_PAGES = CacheGeometry(page_size=512, swa_page_size=128, c128_ring=384)
GEOMETRIES = (
    GEOM,
    SMALL_PAGES,
    LARGE_PAGES,
    CacheGeometry(),
    CacheGeometry(page_size=384, swa_page_size=192, window=100, c4_ring=12, c128_ring=256),
    CacheGeometry(window=192, c4_ring=32, c128_ring=256),
)
RATIO_CHOICES = ((4, 128), (128, 4), (4,), (128,), ())
TOPKS = (512, 1024, 1000, 1)
SIZES = [(GEOM, 512, (4, 128)), (SMALL_PAGES, 1000, (4, 128)), (LARGE_PAGES, 1, (128,)), (GEOM, 512, ())]
WILD = (-1, -2, -(2**31), 2**31 - 1)
WILD_64 = (*WILD, 2**32 + 8, 2**62, -(2**62))


@st.composite
def settings_of_steps(draw: st.DrawFn) -> Setting:
    if COMPILED:
        geom, topk, ratios = draw(st.sampled_from(SIZES))
    else:
        geom, topk, ratios = (draw(st.sampled_from(choices)) for choices in (GEOMETRIES, TOPKS, RATIO_CHOICES))
    pool = draw(pools(geom))
    columns = pool.req_to_token.shape[1]
    longest = draw(st.sampled_from((None, columns + 300, -(-columns * 2 // 3))))
    return Setting(pool, geom, topk, longest, ratios, draw(st.booleans()))


@st.composite
def steps(draw: st.DrawFn, setting: Setting, modes: Sequence[ForwardMode] = MODES) -> Step:
    """A legal step. Requests with id 0 are padding, and their lengths are anything."""
    mode = draw(st.sampled_from(modes))
    longest, num_requests = setting.longest, setting.pool.req_to_token.shape[0]
    reqs = draw(st.lists(st.integers(0, num_requests - 1), max_size=MOST_REQUESTS))
    forms = draw(_forms())
    drafts = num_steps = 0
    extends, grows = None, True
    if mode is ForwardMode.EXTEND:
        most = min(longest, MOST_ROWS // max(1, len(reqs)))
        extends = [draw(st.one_of(st.integers(0, min(most, 9)), near_edges(most))) for _ in reqs]
    elif mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
        drafts = draw(st.integers(1, min(setting.geom.draft_capacity, longest)))
        if draw(st.booleans()):
            extends = [draw(st.integers(0, drafts)) for _ in reqs]
            drafts = draw(st.sampled_from((0, drafts)))
    elif mode is ForwardMode.DRAFT_DECODE:
        grows, num_steps = draw(st.booleans()), draw(st.integers(1, min(4, longest + 1)))
    elif mode is ForwardMode.IDLE:
        extends = draw(st.sampled_from((None, [5 for _ in reqs])))
    counts = extends if extends is not None else [drafts] * len(reqs)

    seqs = []
    for req, count in zip(reqs, counts, strict=True):
        low, high = _range_of_length(mode, count, longest, num_steps if grows else 0)
        if req == 0 or mode is ForwardMode.IDLE:
            wild = WILD if forms[1][0] == torch.int32 else WILD_64
            seqs.append(draw(st.sampled_from((0, 1, 7, *wild))))
        else:
            seqs.append(max(low, draw(near_edges(high))))

    rows = _rows(mode, counts)
    each = num_steps if mode is ForwardMode.DRAFT_DECODE else 1
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    slots = rng.integers(0, len(setting.pool.full_to_swa), rows * each)
    slots[rng.random(rows * each) < 0.1] = -1
    unit = drafts if drafts and extends is None else 1
    padded = draw(st.sampled_from((None, rows, rows + unit, rows + 7 * unit)))
    return Step(mode, reqs, seqs, slots.tolist(), extends, drafts, num_steps, padded, grows, forms)


@st.composite
def scenes(draw: st.DrawFn, modes: Sequence[ForwardMode] = MODES) -> tuple[Setting, Step]:
    setting = draw(settings_of_steps())
    return setting, draw(steps(setting, modes))


@st.composite
def bad_scenes(draw: st.DrawFn) -> tuple[Setting, Step]:
    """A step in which lengths, ids and slots may be anything that fits its dtype."""
    setting, step = draw(scenes())
    num_requests, columns = setting.pool.req_to_token.shape
    kinds = draw(st.sampled_from((("slots",), ("lengths",), ("table",), ("rows",), ("slots", "lengths", "rows"))))
    lists = [list(step.reqs), list(step.seqs), list(step.slots), None if step.extends is None else list(step.extends)]
    edges = (setting.longest + 1, columns + 1, columns + 128, num_requests, num_requests + 1)
    spoiled = {"lengths": (0, 1, 3), "slots": (2,), "rows": (3,)}
    for place in sorted({place for kind in kinds for place in spoiled.get(kind, ())}):
        wild = st.one_of(
            st.sampled_from(edges), st.sampled_from(WILD if step.forms[place][0] == torch.int32 else WILD_64)
        )
        if "rows" in kinds and place == 3:
            wild = st.integers(0, 2)
        for b in range(len(lists[place] or ())):
            if draw(st.integers(0, 3)) == 0:
                lists[place][b] = draw(wild)
    pool = setting.pool
    if "table" in kinds:
        table = pool.req_to_token.copy()
        chance = np.random.default_rng(draw(st.integers(0, 2**16))).random(table.shape)
        for k, slot in enumerate((-2, -(2**31), len(pool.full_to_swa), 2**31 - 1)):
            table[(chance >= k / 100) & (chance < (k + 1) / 100)] = slot
        pool = Pool(table, pool.full_to_swa, pool.spare_columns, pool.skipped_rows)
    bad = Step(step.mode, *lists, step.drafts, step.num_steps, step.padded, step.grows, step.forms)
    return Setting(pool, setting.geom, setting.topk, setting.max_seq_len, setting.ratios, setting.once_a_request), bad


def _rows(mode: ForwardMode, counts: list[int]) -> int:
    if mode in (ForwardMode.DECODE, ForwardMode.DRAFT_DECODE, ForwardMode.IDLE):
        return len(counts)
    return sum(counts)


def _range_of_length(mode: ForwardMode, count: int, longest: int, num_steps: int) -> tuple[int, int]:
    if mode is ForwardMode.TARGET_VERIFY:
        return 0, longest - count
    if mode is ForwardMode.DRAFT_DECODE and num_steps:
        return 0, longest - (num_steps - 1)
    return (count if mode in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND) else 1), longest


@st.composite
def _forms(draw: st.DrawFn) -> tuple[tuple[torch.dtype, str], ...]:
    dtypes = st.just(torch.int64) if COMPILED else st.sampled_from(INT_DTYPES)
    return tuple((draw(dtypes), draw(st.sampled_from(LAYOUTS))) for _ in range(4))
