"""The fixed buffers that metadata lives in: one set for each mode and bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4_backend.batch import ForwardMode
from dsv4_backend.metadata import FIELDS, TABLE_FIELDS, AttnMetadata
from dsv4_backend.plans import (
    DECODE,
    HEADER_FIELDS,
    WRITE,
    CompressPlan,
    DecodePlan,
    DecodePlans,
    PrefillPlan,
    compress_dtype,
)

PREFILL_MODES = (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
"""Modes with several rows a request."""

MAX_TABLE_BYTES = 32 << 20
"""EXTEND keeps a page table a request, not a row, where a bucket's tables would take more than this."""


@dataclass(frozen=True)
class MetadataShape:
    """What decides the size of a row.

    Args:
        page_size: tokens of a page.
        window: tokens that a query sees through the window.
        index_topk: entries that the indexer selects.
        max_seq_len: longest length; the tables have a column for each of its pages.
        ratios: compression ratios with fields of their own.
    """

    page_size: int
    window: int
    index_topk: int
    max_seq_len: int
    ratios: tuple[int, ...]

    def columns(self, kind: str) -> int:
        """Columns of a kind of field (`Field.columns`). Rows of windows and entries take whole groups of 64."""
        pages = -(-self.max_seq_len // self.page_size)
        return {
            "pages": pages,
            "window": _round_up(self.window, 64),
            "topk": self.index_topk,
            "entries": _round_up(pages * (self.page_size // 128), 64),
        }[kind]

    def fields(self) -> Iterator[str]:
        """Names of the fields that these ratios have."""
        return (name for name, spec in FIELDS.items() if not spec.ratio or spec.ratio in self.ratios)

    def table_bytes(self) -> int:
        """Bytes of one row of the tables that EXTEND may keep once a request."""
        names = [name for name in self.fields() if name in TABLE_FIELDS]
        return sum(4 * self.columns(FIELDS[name].columns) for name in names)


@dataclass(frozen=True)
class BucketKey:
    """What a set of buffers is for.

    Args:
        mode: kind of the step.
        num_rows: rows of a step, padding included.
        eager: made for builds without a named bucket, which use its first rows.
        num_requests: rows for tables that are kept once a request, padding's own not counted; 0: once a row.
        num_steps: steps that run a forward; 1 but for DRAFT_DECODE.
        grows: DRAFT_DECODE: the window grows with each step.
        has_prefill_plan, has_decode_plan: which plans are part of it.
    """

    mode: ForwardMode
    num_rows: int
    eager: bool = False
    num_requests: int = 0
    num_steps: int = 1
    grows: bool = False
    has_prefill_plan: bool = False
    has_decode_plan: bool = False


def bucket_key(
    shape: MetadataShape,
    mode: ForwardMode,
    num_rows: int,
    *,
    num_requests: int = 0,
    num_steps: int = 1,
    grows: bool = False,
    eager: bool = False,
) -> BucketKey:
    """The key of a bucket of `num_rows` rows.

    Args:
        num_requests: requests that EXTEND must have room for, should its tables be kept once a request.
        num_steps, grows: only DRAFT_DECODE has more than one step, and plans only where each is a step of its own.
    """
    per_request = mode is ForwardMode.EXTEND and num_rows * shape.table_bytes() > MAX_TABLE_BYTES
    drafts, planned = mode is ForwardMode.DRAFT_DECODE, bool(shape.ratios)
    return BucketKey(
        mode=mode,
        num_rows=num_rows,
        eager=eager,
        num_requests=max(1, num_requests) if per_request else 0,
        num_steps=num_steps if drafts else 1,
        grows=grows,
        has_prefill_plan=planned and mode in PREFILL_MODES,
        has_decode_plan=planned and mode not in PREFILL_MODES and (grows or not drafts),
    )


class BucketBuffers:
    """The tensors of a bucket. They are allocated once, and live as long as the builder.

    They are plain tensors even when made in inference mode, so that they can be written in and out of it.
    """

    @torch.inference_mode(False)
    def __init__(self, key: BucketKey, shape: MetadataShape, device: torch.device) -> None:
        self.key, self.shape = key, shape
        self.tensors: dict[str, torch.Tensor] = {}
        for name in shape.fields():
            spec = FIELDS[name]
            rows = key.num_requests + 1 if key.num_requests and name in TABLE_FIELDS else key.num_rows
            size = (key.num_steps, rows, *((shape.columns(spec.columns),) if spec.columns else ()))
            self.tensors[name] = torch.zeros(size, dtype=spec.dtype, device=device)
        if key.num_requests:
            self.tensors["table_rows"] = torch.zeros((1, key.num_rows), dtype=torch.int32, device=device)
        for ratio in shape.ratios:
            if key.has_decode_plan:
                self._add_plan(f"c{ratio}.rows", DECODE.itemsize, device)
            if key.has_prefill_plan:
                self._add_plan(f"c{ratio}.compress", compress_dtype(key.num_rows).itemsize, device)
                self._add_plan(f"c{ratio}.write", WRITE.itemsize, device)
        if key.mode in PREFILL_MODES:
            self.tensors["header"] = torch.zeros(len(HEADER_FIELDS), dtype=torch.int32, device=device)
            self.tensors["header"].narrow(0, HEADER_FIELDS.index("is_uniform"), 1).fill_(1)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def steps(self, num_rows: int, num_requests: int, error: torch.Tensor) -> list[AttnMetadata]:
        """Views of the first `num_rows` rows (and tables of `num_requests` requests) of each step."""
        return [self._step(step, num_rows, num_requests, error) for step in range(self.key.num_steps)]

    def _add_plan(self, name: str, row_bytes: int, device: torch.device) -> None:
        size = (self.key.num_steps, self.key.num_rows, row_bytes)
        self.tensors[name] = torch.zeros(size, dtype=torch.uint8, device=device)

    def _step(self, step: int, num_rows: int, num_requests: int, error: torch.Tensor) -> AttnMetadata:
        per_request = self.key.num_requests > 0
        views: dict[str, torch.Tensor | None] = dict.fromkeys(FIELDS)
        for name in self.shape.fields():
            rows = num_requests + 1 if per_request and name in TABLE_FIELDS else num_rows
            views[name] = self.tensors[name][step, :rows]
        return AttnMetadata(
            page_size=self.shape.page_size,
            index_topk=self.shape.index_topk,
            table_rows=self.tensors["table_rows"][0, :num_rows] if per_request else None,
            plans=self._plans(step, num_rows, error),
            **views,  # type: ignore[arg-type]
        )

    def _plans(self, step: int, num_rows: int, error: torch.Tensor) -> PrefillPlan | DecodePlans | None:
        def part(name: str) -> torch.Tensor:
            return self.tensors[name][step, :num_rows]

        if self.key.has_decode_plan:
            decode = {ratio: DecodePlan(ratio, part(f"c{ratio}.rows")) for ratio in self.shape.ratios}
            return DecodePlans(error, decode.get(4), decode.get(128))
        if self.key.has_prefill_plan:
            lists = {
                ratio: CompressPlan(ratio, part(f"c{ratio}.compress"), part(f"c{ratio}.write"))
                for ratio in self.shape.ratios
            }
            return PrefillPlan(self.tensors["header"], error, lists.get(4), lists.get(128))
        return None

    def header_plan(self, error: torch.Tensor) -> PrefillPlan:
        """A plan of no ratio: what tells rows apart where there are no plans."""
        return PrefillPlan(self.tensors["header"], error, None, None)


@dataclass(frozen=True, eq=False)
class StepBuffers:
    """What an implementation fills in one build.

    Args:
        metas: one AttnMetadata a step that runs a forward.
        plan: the plan of the modes with several rows a request; of no ratio where the metadata has none.
        error: int32 [1], set by what is wrong with device input.
        num_rows: rows of a step, padding included.
        bucket_rows: rows from one step to the next in memory.
        width: rows of a request, where all have the same number; 0 for IDLE.
        width_word: int32 [1], the same number on the device, for the modes with several rows a request.
        ragged: requests have `extend_lens` rows instead.
        max_extend: most rows that a request may have.
        seq_before: `seq_lens` come without the rows of the step.
        grows: step i counts i tokens more than step 0.
        slots_per_row: slots of a row in `out_cache_loc`, one for each step; with the last step, which builds nothing.
    """

    metas: list[AttnMetadata]
    plan: PrefillPlan | None
    error: torch.Tensor
    num_rows: int
    bucket_rows: int
    width: int
    width_word: torch.Tensor
    ragged: bool
    max_extend: int
    seq_before: bool
    grows: bool
    slots_per_row: int


def _round_up(value: int, base: int) -> int:
    return -(-value // base) * base
