"""Builds the metadata of a step into fixed buffers, in one launch or two that a CUDA graph can record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dsv4_backend import dispatch
from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import RATIOS, CacheGeometry
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_buffers import (
    PREFILL_MODES,
    BucketBuffers,
    BucketKey,
    MetadataShape,
    StepBuffers,
    bucket_key,
)
from dsv4_backend.metadata_checks import check_values
from dsv4_backend.plans import PrefillPlan, check_error, check_num_rows, check_ratios
from dsv4_backend.tables import RequestTables
from dsv4_backend.validation import expect_type

DRAFT_WINDOWS = ("growing", "frozen")

_MAX_VIEWS = 1024


class _Bound(NamedTuple):
    """A batch shape with its views and the function that fills them."""

    key: BucketKey
    steps: StepBuffers
    run: Callable[[RawBatch], None]


class MetadataBuilder:
    """Turns batches of any mode into metadata.

    Args:
        cfg: the model; its window must be that of `geom`.
        geom: cache geometry.
        tables: where the tokens are. Builds read them anew each time.
        max_rows: most rows of a step, padding included (draft steps: rows of one step).
        max_seq_len: longest length of a request; sets the columns of page tables and ratio-128 entries. Lengths are
            also bounded by the columns of `tables.req_to_token`.
        ratios: compression ratios of the layers that it serves. () builds window metadata alone (a window-only
            draft): nothing of ratio 4 or 128 is read, computed or allocated.
        impl: "auto" (Triton on a GPU, torch on a CPU), "triton" or "torch".
        draft_window: window of the draft steps that a graph runner builds; see `build_draft_steps`.
        debug: check every build: wait for it, raise what it flagged, and compare it with the reference. Not while a
            graph is being captured.

    Each mode and bucket (number of padded rows) has buffers of its own, allocated when it is first asked for and never
    moved or freed; further builds allocate nothing. Builds without `padded_rows` use buffers of the next power of two.
    So the first build of a bucket must come before the capture of a graph that builds into it.

    Raises:
        ValueError: an argument is not as above, or `impl` cannot run on the tables' device.

    Source: docs/metadata.md.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        cfg: DSV4Config,
        geom: CacheGeometry,
        tables: RequestTables,
        *,
        max_rows: int,
        max_seq_len: int,
        ratios: Iterable[int] = RATIOS,
        impl: str = "auto",
        draft_window: str = "growing",
        debug: bool = False,
    ) -> None:
        expect_type("cfg", cfg, DSV4Config)
        expect_type("geom", geom, CacheGeometry)
        expect_type("tables", tables, RequestTables)
        for name, value in (("max_rows", max_rows), ("max_seq_len", max_seq_len)):
            if check_num_rows(value, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if cfg.window != geom.window:
            raise ValueError(f"geom: expected the model's window of {cfg.window} tokens, got {geom.window}")
        geom.check_requests(tables.num_requests)
        _check_window(draft_window)
        ratios = tuple(sorted(check_ratios(ratios)))
        self._impl = dispatch.metadata(impl, tables.device)
        self._shape = MetadataShape(geom.page_size, geom.window, cfg.index_topk, max_seq_len, ratios)
        self._geom, self._tables, self._max_rows, self._debug = geom, tables, max_rows, debug
        self._draft_window = draft_window
        self._longest = min(max_seq_len, tables.max_seq_len, cfg.max_position)
        self._error = torch.zeros(1, dtype=torch.int32, device=tables.device)
        self._widths = torch.arange(geom.draft_capacity + 1, dtype=torch.int32, device=tables.device)
        self._buckets: dict[BucketKey, BucketBuffers] = {}
        self._bound: dict[tuple[object, ...], _Bound] = {}

    @property
    def device(self) -> torch.device:
        """Device of the tables, and of everything that is built."""
        return self._tables.device

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios that are served, ascending."""
        return self._shape.ratios

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers so far."""
        return sum(bucket.nbytes for bucket in self._buckets.values())

    def build(self, batch: RawBatch, padded_rows: int | None = None) -> AttnMetadata:
        """The metadata of a step, in any mode but DRAFT_DECODE.

        Args:
            batch: the step, on the tables' device. A request id of 0 is padding, wherever it stands: its rows are
                padding rows, and plans leave them out. IDLE: all rows are padding.
            padded_rows: rows to build, at least those of the batch; the rest is padding. None: as many as it has.

        Returns:
            Views of the buffers of this mode and bucket, the same tensors every time. Valid until its next build.

        Raises:
            ValueError: before anything is written; the message says what was expected and what came. Values on a CPU
                are checked here; on a GPU they set a flag that `check` turns into an exception, and are built as
                padding.
        """
        expect_type("batch", batch, RawBatch)
        if batch.mode is ForwardMode.DRAFT_DECODE:
            raise ValueError("batch: expected any mode but DRAFT_DECODE, whose steps build_draft_steps builds")
        self._check(batch)
        num_rows = self._padded("padded_rows", padded_rows, batch.num_rows)
        bound = self._bound.get(self._name(batch, num_rows, padded_rows is None))
        if bound is None:
            bound = self._bind(batch, num_rows, padded_rows is None)
        self._run(batch, bound)
        return bound.steps.metas[0]

    def build_draft_steps(
        self, batch: RawBatch, padded_batch_size: int | None = None, draft_window: str = "growing"
    ) -> list[AttnMetadata]:
        """The metadata of all draft steps that run a forward: num_steps - 1 of them, in one launch.

        Args:
            batch: mode DRAFT_DECODE, topk 1, on the tables' device. `out_cache_loc` is the list of all steps.
            padded_batch_size: rows of each step, at least B. None: B.
            draft_window: "growing": step i is what DECODE would be with lengths `seq_lens + i + 1` and slots
                `out_cache_loc[b * num_steps + i]`. "frozen": the same slots, but every step has the lengths, positions
                and window of the committed tokens (positions are then not for RoPE), and there are no plans.

        Returns:
            One AttnMetadata a step; as for `build`.

        Raises:
            ValueError: as for `build`; also topk other than 1, since branches do not lie behind each other in the
                request table.
        """
        expect_type("batch", batch, RawBatch)
        if batch.mode is not ForwardMode.DRAFT_DECODE:
            raise ValueError(f"batch: expected mode DRAFT_DECODE, got {batch.mode.value}")
        if batch.topk != 1:
            raise ValueError(f"topk: expected chains of drafts, topk = 1, got {batch.topk}")
        _check_window(draft_window)
        grows = draft_window == "growing"
        self._check(batch, grows)
        num_rows = self._padded("padded_batch_size", padded_batch_size, batch.num_rows)
        if batch.num_steps == 1:
            return []
        bound = self._bound.get(self._name(batch, num_rows, padded_batch_size is None, grows))
        if bound is None:
            bound = self._bind(batch, num_rows, padded_batch_size is None, grows)
        self._run(batch, bound)
        return list(bound.steps.metas)

    # What dsv4_graph_runner's MetadataProvider asks for. `inputs` is any object that has req_pool_indices [B], seq_lens
    # [B] (the committed prefix), out_cache_loc [B * topk * num_steps], batch_size, num_steps and topk.

    def bind_draft(self, inputs: Any) -> list[AttnMetadata]:
        """The metadata of a bucket's draft steps, built once from `inputs`, so that a graph can record the build."""
        return self.build_draft_steps(_draft_batch(inputs), inputs.batch_size, self._draft_window)

    def record_draft(self, inputs: Any) -> None:
        """Builds what `bind_draft` returned for these inputs again; for a graph to record."""
        self.bind_draft(inputs)

    def prepare_draft(self, inputs: Any, raw_batch_size: int) -> None:
        """Nothing: a recorded build reads all that it needs on the device."""

    def build_draft(self, inputs: Any) -> list[AttnMetadata]:
        """The metadata of draft steps that run without a graph."""
        return self.build_draft_steps(_draft_batch(inputs), None, self._draft_window)

    def draft_fingerprint(self) -> tuple[object, ...]:
        """Addresses that a recorded build uses beside those of its inputs and of what `bind_draft` returned."""
        tables = self._tables
        places = (tables.req_to_token, tables.full_to_swa, self._error)
        return tuple((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) for tensor in places)

    def check(self) -> None:
        """Raises ValueError if a build met a bad input on the device since the last check; clears the flag.

        Waits for the current stream, which must be the one that builds.
        """
        check_error(self._error)

    def fingerprint(self) -> int:
        """A hash of the address, shape and strides of every buffer: equal as long as nothing was added or moved."""
        buffers = {str(key): bucket.tensors for key, bucket in self._buckets.items()}
        places = [
            (key, name, t.data_ptr(), tuple(t.shape), t.stride(), str(t.dtype))
            for key in sorted(buffers)
            for name, t in sorted(buffers[key].items())
        ]
        return hash((self._error.data_ptr(), *places))

    def buffers(self) -> dict[BucketKey, dict[str, torch.Tensor]]:
        """All buffers so far, by mode and bucket, then by name."""
        return {key: dict(bucket.tensors) for key, bucket in self._buckets.items()}

    def _padded(self, name: str, padded: int | None, real: int) -> int:
        """Rows to build."""
        if padded is None:
            padded = real
        elif type(padded) is not int or padded < real:
            raise ValueError(f"{name}: expected an int of at least the batch's {real} rows, got {padded!r}")
        if padded > self._max_rows:
            raise ValueError(f"{name}: expected at most max_rows = {self._max_rows}, got {padded}")
        return padded

    def _name(self, batch: RawBatch, num_rows: int, eager: bool, grows: bool = False) -> tuple[object, ...]:
        """Everything that decides which buffers, views and kernels serve a batch."""
        return (
            batch.mode,
            num_rows,
            eager,
            grows,
            batch.num_draft_tokens,
            batch.num_steps,
            batch.extend_lens is not None,
            batch.req_pool_indices.shape[0] if batch.mode is ForwardMode.EXTEND else 0,
        )

    def _bind(self, batch: RawBatch, num_rows: int, eager: bool, grows: bool = False) -> _Bound:
        """Views and kernels for batches like this one."""
        mode, drafts = batch.mode, batch.num_draft_tokens
        if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            self._geom.check_drafts(drafts)
            if batch.extend_lens is None and num_rows % drafts:
                raise ValueError(f"padded_rows: expected a multiple of num_draft_tokens = {drafts}, got {num_rows}")
        num_requests = batch.batch_size if mode is ForwardMode.EXTEND else 0
        key = bucket_key(
            self._shape,
            mode,
            min(_power_of_two(num_rows), self._max_rows) if eager else num_rows,
            num_requests=_power_of_two(num_requests),
            num_steps=max(1, batch.num_steps - 1),
            grows=grows,
            eager=eager,
        )
        bucket = self._bucket(key)
        metas = bucket.steps(num_rows, num_requests, self._error)
        plan = None
        if mode in PREFILL_MODES:
            plan = metas[0].plans if isinstance(metas[0].plans, PrefillPlan) else bucket.header_plan(self._error)
        width = {ForwardMode.IDLE: 0, ForwardMode.DECODE: 1, ForwardMode.DRAFT_DECODE: 1}.get(mode, drafts)
        steps = StepBuffers(
            metas=metas,
            plan=plan,
            error=self._error,
            num_rows=num_rows,
            bucket_rows=key.num_rows,
            width=width,
            width_word=self._widths[width : width + 1],
            ragged=batch.extend_lens is not None and mode is not ForwardMode.IDLE,
            max_extend=self._longest if mode is ForwardMode.EXTEND else drafts or self._geom.draft_capacity,
            seq_before=mode is ForwardMode.TARGET_VERIFY or grows,
            grows=grows,
            slots_per_row=batch.num_steps if mode is ForwardMode.DRAFT_DECODE else 1,
        )
        run = self._impl.bind(steps=steps, tables=self._tables, geom=self._geom, max_seq_len=self._longest)
        if len(self._bound) >= _MAX_VIEWS:
            self._bound.clear()
        bound = self._bound[self._name(batch, num_rows, eager, grows)] = _Bound(key, steps, run)
        return bound

    def _bucket(self, key: BucketKey) -> BucketBuffers:
        bucket = self._buckets.get(key)
        if bucket is None:
            if self._capturing():
                raise ValueError(
                    f"batch: expected a build of {key.mode.value} in a bucket of {key.num_rows} rows before a graph is "
                    "captured with it, since the first build allocates"
                )
            bucket = self._buckets[key] = BucketBuffers(key, self._shape, self.device)
        return bucket

    def _check(self, batch: RawBatch, grows: bool = False) -> None:
        device = self._tables.device
        if batch.req_pool_indices.device != device:
            raise ValueError(f"batch: expected tensors on {device}, got them on {batch.device}")
        if device.type == "cpu":
            check_values(batch, self._tables, self._longest, self._geom, grows)

    def _run(self, batch: RawBatch, bound: _Bound) -> None:
        bound.run(batch)
        if self._debug and not self._capturing():
            self.check()
            self._compare(batch, bound)

    def _compare(self, batch: RawBatch, bound: _Bound) -> None:
        """Raises RuntimeError where a build differs from the reference."""
        from dsv4_backend.reference import metadata as reference

        bucket, steps = BucketBuffers(bound.key, self._shape, self.device), bound.steps
        requests = batch.batch_size if bound.key.num_requests else 0
        error = torch.zeros_like(self._error)
        metas = bucket.steps(steps.num_rows, requests, error)
        expected = replace(steps, metas=metas, error=error)
        reference.bind(steps=expected, tables=self._tables, geom=self._geom, max_seq_len=self._longest)(batch)
        for step, (ours, theirs) in enumerate(zip(steps.metas, metas, strict=True)):
            found = ours.difference(theirs)
            if found:
                raise RuntimeError(f"{batch.mode.value} step {step}: differs from the reference: {found}")

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _check_window(draft_window: object) -> None:
    if draft_window not in DRAFT_WINDOWS:
        raise ValueError(f"draft_window: expected one of {DRAFT_WINDOWS}, got {draft_window!r}")


def _draft_batch(inputs: Any) -> RawBatch:
    return RawBatch(
        ForwardMode.DRAFT_DECODE,
        inputs.req_pool_indices,
        inputs.seq_lens,
        inputs.out_cache_loc,
        num_steps=inputs.num_steps,
        topk=inputs.topk,
    )


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
