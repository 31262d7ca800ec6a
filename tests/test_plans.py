"""Plan containers: layouts to the byte, records, buffers, the error flag."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dsv4_backend import CompressPlan, DecodePlan, DecodePlans, PrefillPlan
from dsv4_backend.plans import (
    DECODE,
    ERROR_LENGTHS,
    ERROR_SLOT,
    HEADER_FIELDS,
    INVALID,
    INVALID_PACKED_WORDS,
    INVALID_WIDE_WORDS,
    INVALID_WRITE_WORDS,
    MAX_ROWS,
    PACKED_COMPRESS,
    PACKED_MAX_ROWS,
    WIDE_COMPRESS,
    WRITE,
    check_num_rows,
    check_ratios,
    compress_dtype,
)


def offsets(dtype: np.dtype) -> dict[str, tuple[int, str]]:
    return {name: (dtype.fields[name][1], dtype.fields[name][0].str) for name in dtype.names}


def test_layouts() -> None:
    pages = {"read_page_0": (8, "<i4"), "read_page_1": (12, "<i4")}
    assert offsets(PACKED_COMPRESS) == {
        "seq_len": (0, "<u4"),
        "ragged_id": (4, "<u2"),
        "buffer_len": (6, "<u2"),
        **pages,
    }
    assert offsets(DECODE) == {"seq_len": (0, "<u4"), "write_loc": (4, "<i4"), **pages}
    assert offsets(WRITE) == {"ragged_id": (0, "<u4"), "write_loc": (4, "<i4")}
    assert offsets(WIDE_COMPRESS) == {
        "seq_len": (0, "<u4"),
        "ragged_id": (4, "<u4"),
        "buffer_len": (8, "<u4"),
        "read_page_0": (12, "<i4"),
        "read_page_1": (16, "<i4"),
    }
    assert [d.itemsize for d in (PACKED_COMPRESS, WIDE_COMPRESS, WRITE, DECODE)] == [16, 20, 8, 16]


def test_markers() -> None:
    assert struct.pack("<4i", *INVALID_PACKED_WORDS) == struct.pack("<IHHii", INVALID, 0, 0, -1, -1)
    assert struct.pack("<5i", *INVALID_WIDE_WORDS) == struct.pack("<IIIii", INVALID, 0, 0, -1, -1)
    assert struct.pack("<2i", *INVALID_WRITE_WORDS) == struct.pack("<Ii", INVALID, -1)


def bytes_of(layout: str, *rows: tuple[int, ...]) -> torch.Tensor:
    packed = b"".join(struct.pack(layout, *row) for row in rows)
    return torch.tensor(list(packed), dtype=torch.uint8).view(len(rows), -1)


def test_records_are_the_valid_rows() -> None:
    plan = CompressPlan(
        4,
        bytes_of("<IHHii", (INVALID, 0, 0, -1, -1), (2**31, 65_535, 127, -1, 2**31 - 1), (INVALID, 7, 7, 7, 7)),
        bytes_of("<Ii", (65_536, -1), (INVALID, 5), (0, 2**31 - 1)),
    )
    assert plan.compress_records().tolist() == [(2**31, 65_535, 127, -1, 2**31 - 1)]
    assert plan.compress_records().dtype == PACKED_COMPRESS
    assert plan.write_records().tolist() == [(65_536, -1), (0, 2**31 - 1)]
    assert DecodePlan(4, bytes_of("<Iiii", (INVALID, -1, 2, 3))).records().tolist() == [(INVALID, -1, 2, 3)]


def test_wide_records() -> None:
    plan = PrefillPlan.empty(PACKED_MAX_ROWS + 1).c128
    plan.compress.view(torch.int32)[:] = torch.tensor(INVALID_WIDE_WORDS, dtype=torch.int32)
    plan.compress[-1] = bytes_of("<IIIii", (9, PACKED_MAX_ROWS, 3, 4, 5))[0]
    assert plan.compress_records().tolist() == [(9, PACKED_MAX_ROWS, 3, 4, 5)]
    assert plan.compress_records().dtype == WIDE_COMPRESS


def test_records_are_a_snapshot() -> None:
    """On every device: the next plan into the same buffers does not change records taken before."""
    lists = CompressPlan(4, bytes_of("<IHHii", (4, 3, 4, 0, 0)), bytes_of("<Ii", (3, 9)))
    rows = DecodePlan(4, bytes_of("<Iiii", (5, 1, 2, 3)))
    taken = [lists.compress_records(), lists.write_records(), rows.records()]
    before = [records.tolist() for records in taken]
    for buffer in (lists.compress, lists.write, rows.rows):
        buffer.fill_(0xAB)
    assert [records.tolist() for records in taken] == before


@pytest.mark.parametrize(
    ("num_rows", "compress_bytes"), [(0, 16), (1, 16), (PACKED_MAX_ROWS, 16), (PACKED_MAX_ROWS + 1, 20)]
)
def test_empty_prefill(num_rows: int, compress_bytes: int) -> None:
    plan = PrefillPlan.empty(num_rows)
    assert plan.header.shape == (len(HEADER_FIELDS),)
    assert plan.header.dtype == plan.error.dtype == torch.int32
    assert plan.error.tolist() == [0]
    for ratio in (4, 128):
        lists = plan.ratio(ratio)
        assert lists is {4: plan.c4, 128: plan.c128}[ratio]
        assert lists.ratio == ratio
        assert lists.compress.shape == (num_rows, compress_bytes)
        assert lists.write.shape == (num_rows, 8)
        assert lists.compress.dtype == lists.write.dtype == torch.uint8
    assert compress_dtype(num_rows).itemsize == compress_bytes
    addresses = [t.data_ptr() for lists in (plan.c4, plan.c128) for t in (lists.compress, lists.write)]
    assert num_rows == 0 or len(set(addresses)) == 4


@pytest.mark.parametrize("batch_size", [0, 1, 70_000])
def test_empty_decode(batch_size: int) -> None:
    plan = DecodePlans.empty(batch_size)
    for ratio in (4, 128):
        rows = plan.ratio(ratio)
        assert rows is {4: plan.c4, 128: plan.c128}[ratio]
        assert rows.ratio == ratio
        assert rows.rows.shape == (batch_size, 16)
    assert plan.error.tolist() == [0]


@pytest.mark.parametrize(
    "ratios", [(), (4,), (128,), (128, 4), iter([4])], ids=["none", "4", "128", "128, 4", "iterator"]
)
def test_ratios_left_out_are_none(ratios: object) -> None:
    ratios = list(ratios)
    for plan in (PrefillPlan.empty(3, iter(ratios)), DecodePlans.empty(3, iter(ratios))):
        assert [r for r in (4, 128) if plan.ratio(r) is not None] == sorted(ratios)


@pytest.mark.parametrize(
    "ratios", [(4, 4), (128, 4, 128), (8,), (0,), (-4,), (4.0,), ("4",), (None,), 4, None], ids=str
)
def test_ratios_refused(ratios: object) -> None:
    with pytest.raises(ValueError, match=r"^ratios: expected .*\(4, 128\).*, got "):
        check_ratios(ratios)


@pytest.mark.parametrize("count", [-1, MAX_ROWS + 1, True, 3.0, "3", None], ids=repr)
def test_row_counts_refused(count: object) -> None:
    with pytest.raises(ValueError, match=r"^num_rows: expected .*, got "):
        check_num_rows(count)
    with pytest.raises(ValueError, match=r"^num_rows: expected .*, got "):
        PrefillPlan.empty(count)
    with pytest.raises(ValueError, match=r"^batch_size: expected .*, got "):
        DecodePlans.empty(count)


def test_row_counts_accepted() -> None:
    assert [check_num_rows(n) for n in (0, 1, MAX_ROWS)] == [0, 1, MAX_ROWS]


@pytest.mark.parametrize("plan", [PrefillPlan.empty(1), DecodePlans.empty(1)], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("code", "texts"),
    [
        (ERROR_LENGTHS, ["length or request id"]),
        (ERROR_SLOT, ["beyond full_to_swa"]),
        (ERROR_LENGTHS | ERROR_SLOT, ["length or request id", "beyond full_to_swa"]),
    ],
)
def test_check_raises_once(plan: PrefillPlan | DecodePlans, code: int, texts: list[str]) -> None:
    plan.check()
    plan.error.fill_(code)
    with pytest.raises(ValueError, match=r"^device input: ") as raised:
        plan.check()
    assert [text in str(raised.value) for text in ("length or request id", "beyond full_to_swa")] == [
        text in texts for text in ("length or request id", "beyond full_to_swa")
    ]
    assert plan.error.tolist() == [0]
    plan.check()


BYTES = torch.zeros(4096, dtype=torch.uint8)
META = torch.device("meta")


def compress_plan(ratio: int = 4, **changes: object) -> CompressPlan:
    tensors = {"compress": BYTES[:128].view(8, 16), "write": BYTES[512:576].view(8, 8)} | changes
    return CompressPlan(ratio, **tensors)


def prefill_plan(**changes: object) -> PrefillPlan:
    return dataclasses.replace(PrefillPlan.empty(8), **changes)


def decode_plans(**changes: object) -> DecodePlans:
    return dataclasses.replace(DecodePlans.empty(2), **changes)


REFUSED = [
    (compress_plan, {"compress": None}, "c4.compress: expected a torch.Tensor, got NoneType"),
    (compress_plan, {"compress": BYTES[:128].view(8, 16).char()}, "c4.compress: expected dtype uint8, got int8"),
    (compress_plan, {"compress": BYTES[:128]}, "c4.compress: expected 2 dimensions, got shape [128]"),
    (
        compress_plan,
        {"compress": BYTES[:160].view(8, 20)},
        "c4.compress: expected a contiguous tensor of shape [8, 16]",
    ),
    (compress_plan, {"compress": BYTES[:128].view(16, 8).t()}, "c4.compress: expected a contiguous tensor of"),
    (compress_plan, {"compress": BYTES[:256].view(8, 32)[:, :16]}, "c4.compress: expected a contiguous tensor of"),
    (
        compress_plan,
        {"compress": BYTES[4:132].view(8, 16)},
        "c4.compress: expected an address that is a multiple of 16",
    ),
    (compress_plan, {"write": [0]}, "c4.write: expected a torch.Tensor, got list"),
    (compress_plan, {"write": BYTES[:72].view(9, 8)}, "c4.write: expected a contiguous tensor of shape [8, 8], got"),
    (compress_plan, {"write": BYTES[8:72].view(8, 8)}, "c4.write: expected an address that is a multiple of 16, got"),
    (compress_plan, {"write": torch.zeros(8, 8, dtype=torch.uint8, device=META)}, "c4.write: expected a tensor on cpu"),
    (prefill_plan, {"header": torch.zeros(7, dtype=torch.int32)}, "header: expected a contiguous tensor of shape [8]"),
    (prefill_plan, {"header": torch.zeros(8, dtype=torch.int64)}, "header: expected dtype int32, got int64"),
    (prefill_plan, {"error": torch.zeros((), dtype=torch.int32)}, "error: expected 1 dimension, got shape []"),
    (
        prefill_plan,
        {"error": torch.zeros(1, dtype=torch.int32, device=META)},
        "error: expected a tensor on cpu",
    ),
    (prefill_plan, {"error": None}, "error: expected a torch.Tensor, got NoneType"),
    (
        prefill_plan,
        {"c4": DecodePlan(4, BYTES[:32].view(2, 16))},
        "c4: expected a CompressPlan or None, got",
    ),
    (prefill_plan, {"c4": compress_plan(128)}, "c4: expected a plan of ratio 4, got one of"),
    (prefill_plan, {"c128": compress_plan(4)}, "c128: expected a plan of ratio 128, got one of"),
    (prefill_plan, {"c128": PrefillPlan.empty(9).c128}, "c128.compress: expected a contiguous tensor of"),
    (
        prefill_plan,
        {"c4": PrefillPlan.empty(8, device=META).c4},
        "c4.compress: expected a tensor on cpu, got",
    ),
    (DecodePlan, {"ratio": 4, "rows": None}, "c4.rows: expected a torch.Tensor, got NoneType"),
    (
        DecodePlan,
        {"ratio": 4, "rows": BYTES[:64].view(2, 32)[:, ::2]},
        "c4.rows: expected a contiguous tensor of",
    ),
    (DecodePlan, {"ratio": 128, "rows": BYTES[8:40].view(2, 16)}, "c128.rows: expected an address that is a multiple"),
    (
        DecodePlan,
        {"ratio": 4, "rows": torch.zeros(2, 4, dtype=torch.int32)},
        "c4.rows: expected dtype uint8, got",
    ),
    (decode_plans, {"error": torch.zeros(1)}, "error: expected dtype int32, got float32"),
    (decode_plans, {"c4": compress_plan()}, "c4: expected a DecodePlan or None, got CompressPlan"),
    (
        decode_plans,
        {"c4": DecodePlan(128, BYTES[:32].view(2, 16))},
        "c4: expected a plan of ratio 4, got one of",
    ),
    (
        decode_plans,
        {"c128": DecodePlan(128, BYTES[:48].view(3, 16))},
        "c128.rows: expected a contiguous tensor of",
    ),
    (decode_plans, {"c4": DecodePlans.empty(2, device=META).c4}, "c4.rows: expected a tensor on cpu, got"),
]


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [pytest.param(*case, id=f"{i}-{case[0].__name__}-{'-'.join(case[1])}") for i, case in enumerate(REFUSED)],
)
def test_buffers_that_kernels_cannot_write_are_refused(
    make: Callable[..., object], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got ") as raised:
        make(**changes)
    assert str(raised.value).startswith(message)


def test_caller_made_buffers_are_accepted() -> None:
    """Views of one allocation, as a builder that owns its memory has them."""
    c4 = CompressPlan(4, BYTES[:128].view(8, 16), BYTES[128:192].view(8, 8))
    c128 = CompressPlan(128, BYTES[192:320].view(8, 16), BYTES[320:384].view(8, 8))
    words = torch.zeros(12, dtype=torch.int32)
    plan = PrefillPlan(words[:8], words[8:9], c4, c128)
    assert (plan.ratios, plan.num_rows, plan.device) == ((4, 128), 8, torch.device("cpu"))
    assert c4.compress_words.data_ptr() == c4.compress.data_ptr()
    assert (c4.compress_words.shape, c4.write_words.shape) == ((8, 4), (8, 2))
    assert [name for name, _ in plan.tensors()] == ["header", "c4.compress", "c4.write", "c128.compress", "c128.write"]
    decode = DecodePlans(words[8:9], None, DecodePlan(128, BYTES[:32].view(2, 16)))
    assert (decode.ratios, decode.num_rows) == ((128,), 2)
    assert decode.c128.words.shape == (2, 4)
    assert [name for name, _ in decode.tensors()] == ["c128.rows"]
    assert (PrefillPlan.empty(8, ()).num_rows, PrefillPlan.empty(70_000).c4.compress_words.shape) == (None, (70_000, 5))


def test_plans_are_frozen() -> None:
    plan = PrefillPlan.empty(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.c4 = None


def test_buffers_do_not_share_memory() -> None:
    plan = PrefillPlan.empty(8)
    words = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ValueError, match="header: expected memory of its own, got some of error"):
        PrefillPlan(words[:8], words[:1], plan.c4, plan.c128)
    memory = torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"c4.write: expected memory of its own, got some of c4.compress"):
        PrefillPlan(plan.header, plan.error, CompressPlan(4, memory[:128].view(8, 16), memory[64:128].view(8, 8)), None)
    with pytest.raises(ValueError, match="memory of its own"):
        DecodePlans(plan.error, DecodePlan(4, memory[:128].view(8, 16)), DecodePlan(128, memory[:128].view(8, 16)))
    # One flag may serve several plans.
    PrefillPlan(torch.zeros(8, dtype=torch.int32), plan.error, plan.c4, plan.c128)
