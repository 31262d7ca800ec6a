"""Kernels of attention and of the indexer, as `compile_kernels` compiles them."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4_backend.layouts import EntryLayout
from dsv4_triton_kernels import attention, attention_attend, attention_combine, indexer, topk

KernelCase = tuple[object, str, dict[str, object], dict[str, str]]
TARGET = ("sink_ptr", "position_ptr", "rope_ptr", "out_ptr", "lse_ptr")
ABSENT = ("compressed_ptr", "compressed_extra_ptr", "compressed_index_ptr", "compressed_length_ptr")
ABSENT += ("compressed_row_ptr",)
ABSENT += ("sink_ptr", "position_ptr", "rope_ptr", "lse_ptr")
PARTIAL = ("partial_ptr", "partial_lse_ptr")


def attention_cases(major: int) -> Iterator[KernelCase]:
    """Every format, with many heads and with few; one split and several, one list and two."""
    sizes = [("fp8", 512, 64, 64), ("fp8", 512, 64, 4), ("bf16", 512, 64, 64), ("bf16", 512, 64, 4)]
    sizes += [("fp32", 512, 64, 64), ("bf16", 64, 16, 64), ("fp8", 128, 64, 64)]
    for kv, dim, rope, heads in sizes:
        layouts = [EntryLayout(kv, dim, rope, page) for page in (256, 64)]
        data = {"fp8": "*u8", "bf16": "*bf16", "fp32": "*fp32"}[kv]
        query = "*fp32" if kv == "fp32" else "*bf16"
        types = {"q_ptr": query, "out_ptr": query, "scale": "fp32", "position_ptr": "*i64"}
        types |= dict.fromkeys(("window_ptr", "compressed_ptr"), data)
        types |= dict.fromkeys(("window_extra_ptr", "compressed_extra_ptr"), "*i16" if kv == "fp8" else data)
        types |= dict.fromkeys(("sink_ptr", "rope_ptr", "lse_ptr", *PARTIAL), "*fp32")
        block = {**attention.block_sizes(kv, dim, heads, major), "PDL": True}
        both = attention_attend.entry_constants(*layouts) | block
        yield attention_attend._attend_entries_kernel, "", both | dict.fromkeys(PARTIAL), types
        if heads == 64 and dim == 512:
            one_each = dict.fromkeys((*TARGET, "compressed_row_ptr"))
            yield attention_attend._attend_entries_kernel, "", both | one_each, types
        if heads == 4:
            one = attention_attend.entry_constants(layouts[0], None) | block | dict.fromkeys((*PARTIAL, *ABSENT))
            yield attention_attend._attend_entries_kernel, "", one, types
            continue
        for splits in (2, 4, 64):
            combine = {"D": dim, "ROPE": rope, **attention_combine.combine_sizes(splits, dim), "PDL": True}
            yield attention_combine._combine_splits_kernel, "", combine, types


def index_cases() -> Iterator[KernelCase]:
    """Queries and scores of every format, of the model's size and of a small one; selection with and without scores."""
    layouts = [EntryLayout(kv, 128, 64, 64, indexer=True) for kv in ("fp8", "bf16", "fp32")]
    layouts.append(EntryLayout("fp8", 32, 16, 48, indexer=True))
    for layout in layouts:
        data = {"fp8": "*u8", "bf16": "*bf16", "fp32": "*fp32"}[layout.format]
        heads, dim = (64 if layout.head_dim == 128 else 6), layout.head_dim
        query = {"FACTOR": 0.01, "FORMAT": layout.format, "HEADS": heads, "D": dim, "LOG_D": dim.bit_length() - 1}
        query |= {"ROPE": layout.rope_dim, **indexer.QUERY_ROWS, "PDL": True}
        stored = "*i16" if layout.format == "bf16" else data
        for value, position in (("*bf16", "*i32"), ("*fp32", "*i64")):
            types = {"q_ptr": value, "head_weight_ptr": value, "position_ptr": position, "rope_ptr": "*fp32"}
            yield indexer._store_query_kernel, "", query, types | {"value_ptr": stored, "weight_ptr": "*fp32"}
        types = {"value_ptr": data, "key_ptr": data, "scale_ptr": "*fp32", "weight_ptr": "*fp32", "out_ptr": "*fp32"}
        scores = {"FORMAT": layout.format, "PAGE": layout.page_entries, "PAGE_BYTES": layout.page_bytes}
        scores |= {"HEADS": heads, "HEAD_BLOCK": max(16, heads), "D": dim, "INTERPRETED": False, "PDL": True}
        scores |= indexer.SCORE_TURNS[layout.format]
        scores["STEP"] = min(dim, indexer.FLOAT32_STEP) if layout.format == "fp32" else dim
        for absent in ({}, {"table_rows_ptr": None}):
            yield indexer._score_keys_kernel, "", scores | absent, types
    for _, sizes in topk.TURNS:
        for absent in ({}, {"table_rows_ptr": None, "raw_ptr": None}, {"score_ptr": None}):
            yield topk._select_topk_kernel, "", {"PAGE": 64, **sizes, "PDL": True} | absent, {"score_ptr": "*fp32"}
