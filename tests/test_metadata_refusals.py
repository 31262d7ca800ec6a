"""What RawBatch and MetadataBuilder refuse, with which words, and before anything is written."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch

import dsv4_backend as d4
from backends import INTERPRET
from dsv4_backend import ForwardMode
from dsv4_backend.plans import MAX_ROWS
from metadata_checks import assert_same_bits, contents, setting_of
from metadata_steps import GEOM, Step, whole

DECODE, EXTEND, VERIFY, DRAFT_EXTEND, DRAFT, IDLE = (
    ForwardMode.DECODE,
    ForwardMode.EXTEND,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.DRAFT_EXTEND,
    ForwardMode.DRAFT_DECODE,
    ForwardMode.IDLE,
)
META = torch.device("meta")
SETTING = setting_of(600, num_requests=5)


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def legal(mode: ForwardMode) -> dict[str, object]:
    """Arguments of a batch of two requests."""
    slots = {EXTEND: 8, VERIFY: 8, DRAFT_EXTEND: 8, DRAFT: 6}.get(mode, 2)
    arguments: dict[str, object] = dict(
        mode=mode, req_pool_indices=lens(1, 4), seq_lens=lens(5, 9), out_cache_loc=torch.arange(300, 300 + slots)
    )
    if mode is EXTEND:
        arguments["extend_lens"] = lens(5, 3)
    if mode in (VERIFY, DRAFT_EXTEND):
        arguments["num_draft_tokens"] = 4
    if mode is DRAFT:
        arguments["num_steps"] = 3
    return arguments


# mode, arguments that replace the legal ones, and the message
REFUSED_BATCHES = [
    (DECODE, {"mode": "DECODE"}, "mode: expected a ForwardMode, got str"),
    (DECODE, {"mode": None}, "mode: expected a ForwardMode, got NoneType"),
    (DECODE, {"req_pool_indices": [1, 4]}, "req_pool_indices: expected a torch.Tensor, got list"),
    (DECODE, {"req_pool_indices": lens(1, 4).float()}, "req_pool_indices: expected dtype int32 or int64, got float32"),
    (DECODE, {"req_pool_indices": lens(1, 4)[None]}, "req_pool_indices: expected 1 dimension, got shape [1, 2]"),
    (DECODE, {"seq_lens": np.array([5, 9])}, "seq_lens: expected a torch.Tensor, got ndarray"),
    (DECODE, {"seq_lens": lens(5, 9).short()}, "seq_lens: expected dtype int32 or int64, got int16"),
    (DECODE, {"seq_lens": torch.tensor(5)}, "seq_lens: expected 1 dimension, got shape []"),
    (DECODE, {"seq_lens": lens(5, 9, 1)}, "seq_lens: expected 2 elements, got 3"),
    (DECODE, {"seq_lens": lens(5, 9).to(META)}, "seq_lens: expected a tensor on cpu, got one on meta"),
    (DECODE, {"out_cache_loc": None}, "out_cache_loc: expected a torch.Tensor, got NoneType"),
    (DECODE, {"out_cache_loc": lens(5, 9).bool()}, "out_cache_loc: expected dtype int32 or int64, got bool"),
    (DECODE, {"out_cache_loc": lens(5, 9)[:, None]}, "out_cache_loc: expected 1 dimension, got shape [2, 1]"),
    (DECODE, {"out_cache_loc": lens(5, 9).to(META)}, "out_cache_loc: expected a tensor on cpu, got one on meta"),
    (DECODE, {"out_cache_loc": lens(5)}, "out_cache_loc: expected 2 slots (one for each of 2 requests), got 1"),
    (
        DECODE,
        {"out_cache_loc": torch.arange(6)},
        "out_cache_loc: expected 2 slots (one for each of 2 requests), got 6; mode EXTEND takes several "
        "rows of a request, DRAFT_DECODE the slots of all draft steps",
    ),
    (
        DECODE,
        {"out_cache_loc": torch.arange(5)},
        "out_cache_loc: expected 2 slots (one for each of 2 requests), got 5; mode EXTEND takes several ",
    ),
    (DECODE, {"extend_lens": lens(1, 1)}, "extend_lens: expected none in mode DECODE, got a tensor"),
    (DRAFT, {"extend_lens": lens(1, 1)}, "extend_lens: expected none in mode DRAFT_DECODE, got a tensor"),
    (EXTEND, {"extend_lens": None}, "extend_lens: expected int32 or int64 [B] in mode EXTEND, got none"),
    (EXTEND, {"extend_lens": [5, 3]}, "extend_lens: expected a torch.Tensor, got list"),
    (EXTEND, {"extend_lens": lens(5, 3).double()}, "extend_lens: expected dtype int32 or int64, got float64"),
    (EXTEND, {"extend_lens": lens(8)}, "extend_lens: expected 2 elements, got 1"),
    (EXTEND, {"extend_lens": lens(5, 3).to(META)}, "extend_lens: expected a tensor on cpu, got one on meta"),
    (VERIFY, {"extend_lens": lens(5, 3)[None]}, "extend_lens: expected 1 dimension, got shape [1, 2]"),
    (
        VERIFY,
        {"num_draft_tokens": 0},
        "num_draft_tokens: expected an int of at least 1 in mode TARGET_VERIFY, got 0",
    ),
    (
        DRAFT_EXTEND,
        {"num_draft_tokens": -1, "extend_lens": lens(5, 3)},
        "num_draft_tokens: expected an int of at least 0 in mode DRAFT_EXTEND, got -1",
    ),
    (VERIFY, {"num_draft_tokens": 4.0}, "num_draft_tokens: expected an int of at least 1 in mode TARGET_VERIFY, got"),
    (VERIFY, {"num_draft_tokens": True}, "num_draft_tokens: expected an int of at least 1 in mode TARGET_VERIFY, got"),
    (
        VERIFY,
        {"num_draft_tokens": 3},
        "out_cache_loc: expected 6 slots (2 requests x 3 draft tokens), got 8",
    ),
    (DRAFT, {"num_steps": 0}, "num_steps: expected an int of at least 1 in mode DRAFT_DECODE, got 0"),
    (DRAFT, {"num_steps": None}, "num_steps: expected an int of at least 1 in mode DRAFT_DECODE, got None"),
    (DECODE, {"num_steps": -1}, "num_steps: expected an int of at least 0 in mode DECODE, got -1"),
    (DRAFT, {"topk": 0}, "topk: expected an int of at least 1 in mode DRAFT_DECODE, got 0"),
    (DRAFT, {"topk": 2}, "out_cache_loc: expected 12 slots (2 requests x 2 x 3 steps), got 6"),
    (
        DRAFT,
        {"out_cache_loc": lens(5, 9)},
        "out_cache_loc: expected 6 slots (2 requests x 1 x 3 steps), got 2; build_draft_steps takes the slots of all "
        "steps, not those of one",
    ),
]


@pytest.mark.parametrize(
    ("mode", "changes", "message"),
    [pytest.param(*case, id=f"{i}-{case[0].value}-{'-'.join(case[1])}") for i, case in enumerate(REFUSED_BATCHES)],
)
def test_batches_that_are_refused(mode: ForwardMode, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        d4.RawBatch(**{**legal(mode), **changes})


@pytest.mark.parametrize("mode", list(ForwardMode), ids=lambda mode: mode.value)
def test_the_legal_arguments_are_legal(mode: ForwardMode) -> None:
    batch = d4.RawBatch(**legal(mode))
    builder = SETTING.builder("torch", "cpu")
    metas = builder.build_draft_steps(batch) if mode is DRAFT else [builder.build(batch)]
    assert {meta.num_rows for meta in metas} == {batch.num_rows}
    assert batch.num_rows == (2 if mode is DRAFT else batch.out_cache_loc.shape[0])
    assert (batch.batch_size, batch.ragged, batch.device) == (2, mode is EXTEND, torch.device("cpu"))


# mode, arguments of the batch, keyword arguments of the build, and the message
REFUSED_BUILDS = [
    (DECODE, {}, {"padded_rows": 1}, "padded_rows: expected an int of at least the batch's 2 rows, got 1"),
    (DECODE, {}, {"padded_rows": 4.0}, "padded_rows: expected an int of at least the batch's 2 rows, got 4.0"),
    (DECODE, {}, {"padded_rows": True}, "padded_rows: expected an int of at least the batch's 2 rows, got True"),
    (DECODE, {}, {"padded_rows": 65}, "padded_rows: expected at most max_rows = 64, got 65"),
    (IDLE, {"out_cache_loc": torch.zeros(65).int()}, {}, "padded_rows: expected at most max_rows = 64, got 65"),
    (DRAFT, {}, {"padded_batch_size": 1}, "padded_batch_size: expected an int of at least the batch's 2 rows, got 1"),
    (DRAFT, {}, {"padded_batch_size": 65}, "padded_batch_size: expected at most max_rows = 64, got 65"),
    (VERIFY, {}, {"padded_rows": 10}, "padded_rows: expected a multiple of num_draft_tokens = 4, got 10"),
    (
        DRAFT_EXTEND,
        {"num_draft_tokens": 11, "out_cache_loc": torch.arange(22), "seq_lens": lens(15, 19)},
        {},
        "num_draft_tokens: expected at most 10, got 11 (needs 17 rows in the ratio-4 ring of 16)",
    ),
    (DRAFT, {"topk": 2, "num_steps": 3, "out_cache_loc": torch.arange(12)}, {}, "topk: expected chains of drafts"),
    (DECODE, {"seq_lens": lens(0, 9)}, {}, "seq_lens[0]: expected 1 to 600 in mode DECODE (the longest request has"),
    (DECODE, {"seq_lens": lens(5, 601)}, {}, "seq_lens[1]: expected 1 to 600 in mode DECODE"),
    (DECODE, {"seq_lens": lens(5, 2**63 - 1)}, {}, "seq_lens[1]: expected 1 to 600 in mode DECODE"),
    (DECODE, {"seq_lens": lens(-(2**63), 5)}, {}, "seq_lens[0]: expected 1 to 600 in mode DECODE"),
    (DECODE, {"req_pool_indices": lens(1, 5)}, {}, "req_pool_indices[1]: expected 0 to 4 (rows of req_to_token), got"),
    (DECODE, {"req_pool_indices": lens(-1, 4)}, {}, "req_pool_indices[0]: expected 0 to 4 (rows of req_to_token), got"),
    (EXTEND, {"seq_lens": lens(4, 9)}, {}, "seq_lens[0]: expected 5 to 600 in mode EXTEND"),
    (EXTEND, {"seq_lens": lens(5, 601)}, {}, "seq_lens[1]: expected 3 to 600 in mode EXTEND"),
    (EXTEND, {"extend_lens": lens(-1, 9)}, {}, "extend_lens[0]: expected 0 to 600 (the longest request), got -1"),
    (EXTEND, {"extend_lens": lens(5, 601)}, {}, "extend_lens[1]: expected 0 to 600 (the longest request), got 601"),
    (EXTEND, {"extend_lens": lens(5, 2)}, {}, "out_cache_loc: expected 7 slots (the sum of extend_lens), got 8"),
    (EXTEND, {"extend_lens": lens(5, 4)}, {}, "out_cache_loc: expected 9 slots (the sum of extend_lens), got 8"),
    (VERIFY, {"seq_lens": lens(-1, 9)}, {}, "seq_lens[0]: expected 0 to 596 in mode TARGET_VERIFY"),
    (VERIFY, {"seq_lens": lens(5, 597)}, {}, "seq_lens[1]: expected 0 to 596 in mode TARGET_VERIFY"),
    (VERIFY, {"extend_lens": lens(5, 3)}, {}, "extend_lens[0]: expected 0 to 4 (draft tokens), got 5"),
    (
        VERIFY,
        {"extend_lens": lens(11, 3), "num_draft_tokens": 0},
        {},
        "extend_lens[0]: expected 0 to 10 (draft tokens), got 11",
    ),
    (VERIFY, {"extend_lens": lens(4, 4), "seq_lens": lens(0, 597)}, {}, "seq_lens[1]: expected 0 to 596 in mode"),
    (DRAFT_EXTEND, {"seq_lens": lens(3, 9)}, {}, "seq_lens[0]: expected 4 to 600 in mode DRAFT_EXTEND"),
    (DRAFT_EXTEND, {"seq_lens": lens(4, 601)}, {}, "seq_lens[1]: expected 4 to 600 in mode DRAFT_EXTEND"),
    (DRAFT, {"seq_lens": lens(-1, 9)}, {}, "seq_lens[0]: expected 0 to 598 in mode DRAFT_DECODE"),
    (DRAFT, {"seq_lens": lens(0, 599)}, {}, "seq_lens[1]: expected 0 to 598 in mode DRAFT_DECODE"),
    (
        DRAFT,
        {"seq_lens": lens(0, 9)},
        {"draft_window": "frozen"},
        "seq_lens[0]: expected 1 to 600 in mode DRAFT_DECODE",
    ),
    (DRAFT, {"seq_lens": lens(5, 601)}, {"draft_window": "frozen"}, "seq_lens[1]: expected 1 to 600 in mode"),
]


@pytest.mark.parametrize(
    ("mode", "changes", "options", "message"),
    [
        pytest.param(*case, id=f"{i}-{case[0].value}-{'-'.join((*case[1], *case[2]))}")
        for i, case in enumerate(REFUSED_BUILDS)
    ],
)
def test_builds_that_are_refused_write_nothing(
    mode: ForwardMode, changes: dict[str, object], options: dict[str, object], message: str
) -> None:
    tables = SETTING.tables("cpu")
    builder = SETTING.builder("torch", "cpu", tables=tables, max_rows=64)
    build = builder.build_draft_steps if mode is DRAFT else builder.build
    build(d4.RawBatch(**legal(mode)))
    batch = d4.RawBatch(**{**legal(mode), **changes})
    inputs = [whole(value) for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    inputs += [whole(tables.req_to_token), whole(tables.full_to_swa), builder._error]
    before, values, places = contents(builder), [t.clone() for t in inputs], builder.fingerprint()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        build(batch, **options)
    assert_same_bits(contents(builder), before)
    assert builder.fingerprint() == places
    assert all(torch.equal(now, then) for now, then in zip(inputs, values, strict=True))
    build(d4.RawBatch(**legal(mode)))
    assert_same_bits(contents(builder), before)


def test_the_wrong_call_for_a_mode_is_refused() -> None:
    builder = SETTING.builder("torch", "cpu")
    with pytest.raises(ValueError, match=r"^batch: expected any mode but DRAFT_DECODE, whose steps build_draft_steps"):
        builder.build(d4.RawBatch(**legal(DRAFT)))
    for mode in set(ForwardMode) - {DRAFT}:
        with pytest.raises(ValueError, match=f"^batch: expected mode DRAFT_DECODE, got {mode.value}$"):
            builder.build_draft_steps(d4.RawBatch(**legal(mode)))
    for build in (builder.build, builder.build_draft_steps):
        with pytest.raises(ValueError, match=r"^batch: expected a RawBatch, got Step$"):
            build(Step(DECODE, [1], [1], [1]))
    assert builder.nbytes == 0


def test_more_drafts_than_the_rings_hold_are_refused_at_the_limit() -> None:
    for geom in (GEOM, d4.CacheGeometry()):
        setting = dataclasses.replace(SETTING, geom=geom)
        most = geom.draft_capacity
        for mode in (VERIFY, DRAFT_EXTEND):
            for drafts in (most, most + 1):
                step = Step(mode, [1], [100], list(range(300, 300 + drafts)), drafts=drafts)
                if drafts == most:
                    assert step.build(setting.builder("torch", "cpu"))[0].num_rows == most
                    continue
                with pytest.raises(ValueError, match=f"^num_draft_tokens: expected at most {most}, got {most + 1}"):
                    step.build(setting.builder("torch", "cpu"))


def test_padding_may_have_any_length_but_no_senseless_number_of_rows() -> None:
    """The rows of padding count, so that later requests have their place."""
    builder = SETTING.builder("torch", "cpu")
    for seq in (-5, 0, 601, 2**40):
        batch = {**legal(EXTEND), "req_pool_indices": lens(0, 4), "seq_lens": lens(seq, 9)}
        assert builder.build(d4.RawBatch(**batch)).seq_lens_causal.tolist() == [1] * 5 + [7, 8, 9]
    with pytest.raises(ValueError, match=r"^extend_lens\[0\]: expected 0 to 600"):
        builder.build(d4.RawBatch(**{**batch, "extend_lens": lens(-1, 9)}))


CFG = d4.DSV4Config.v4_flash()
REFUSED_BUILDERS = [
    ({"cfg": None}, "cfg: expected a DSV4Config, got NoneType"),
    ({"geom": 256}, "geom: expected a CacheGeometry, got int"),
    ({"tables": (1, 2)}, "tables: expected a RequestTables, got tuple"),
    ({"max_rows": 0}, "max_rows: expected at least 1, got 0"),
    ({"max_rows": -1}, f"max_rows: expected a number from 0 to {MAX_ROWS}, got -1"),
    ({"max_rows": MAX_ROWS + 1}, f"max_rows: expected a number from 0 to {MAX_ROWS}, got {MAX_ROWS + 1}"),
    ({"max_rows": 8.0}, "max_rows: expected an int, got 8.0"),
    ({"max_rows": None}, "max_rows: expected an int, got None"),
    ({"max_seq_len": 0}, "max_seq_len: expected at least 1, got 0"),
    ({"max_seq_len": True}, "max_seq_len: expected an int, got True"),
    (
        {"geom": d4.CacheGeometry(window=64)},
        "geom: expected the model's window of 128 tokens, got 64",
    ),
    ({"ratios": (4, 4)}, "ratios: expected a selection of (4, 128), each at most once, got (4, 4)"),
    ({"ratios": (0,)}, "ratios: expected a selection of (4, 128), each at most once, got (0,)"),
    ({"ratios": 4}, "ratios: expected a selection of (4, 128), each at most once, got 4"),
    ({"impl": "cuda"}, "impl: expected one of ('auto', 'triton', 'torch'), got 'cuda'"),
    (
        {
            "tables": d4.RequestTables(torch.zeros(1, 1).int().expand(2**23, 1), torch.zeros(1).long()),
        },
        "geom: expected fewer than 2^31 state rows for ratio 128, got 8388608 requests of 256 rows",
    ),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [pytest.param(*case, id=f"{i}-{'-'.join(case[0])}") for i, case in enumerate(REFUSED_BUILDERS)],
)
def test_builders_that_are_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"cfg": CFG, "geom": GEOM, "tables": SETTING.tables("cpu"), "max_rows": 8, "max_seq_len": 600}
    d4.MetadataBuilder(**arguments)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        d4.MetadataBuilder(**{**arguments, **changes})


@pytest.mark.skipif(INTERPRET, reason="the interpreter runs Triton on a CPU")
def test_an_explicit_choice_never_falls_back() -> None:
    with pytest.raises(ValueError, match=r"^impl: expected a GPU, or TRITON_INTERPRET=1, for 'triton', got .* cpu$"):
        SETTING.builder("triton", "cpu")


@pytest.mark.gpu
def test_a_batch_on_another_device_is_refused() -> None:
    builder = SETTING.builder("auto", "cuda")
    with pytest.raises(ValueError, match=r"^batch: expected tensors on cuda:0, got them on cpu$"):
        builder.build(d4.RawBatch(**legal(DECODE)))
    with pytest.raises(ValueError, match=r"^batch: expected tensors on cpu, got them on cuda:0$"):
        Step(DECODE, [1], [1], [1]).build(SETTING.builder("torch", "cpu"), Step(DECODE, [1], [1], [1]).tensors("cuda"))
    with pytest.raises(ValueError, match=r"^seq_lens: expected a tensor on cuda:0, got one on cpu$"):
        d4.RawBatch(**{**legal(DECODE), "req_pool_indices": lens(1, 4).cuda()})
    assert builder.nbytes == 0
