"""The runner: captures a draft loop for every bucket, and replays padded batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from dsv4_graph_runner.batch import DraftBatch, DraftInputs, DraftOutput
from dsv4_graph_runner.buckets import BucketPolicy
from dsv4_graph_runner.buffers import StaticBuffers, exact_inputs
from dsv4_graph_runner.capture import CudaGraphExecutor, EagerExecutor, Executor, Progress, capture_all
from dsv4_graph_runner.distributed import RankGroup
from dsv4_graph_runner.draft_loop import run_draft_chain
from dsv4_graph_runner.fingerprint import addresses, expect_unchanged
from dsv4_graph_runner.options import check_options, check_variants, resolve_executor
from dsv4_graph_runner.protocols import DraftModel, MetadataProvider
from dsv4_graph_runner.report import CaptureReport, GraphKey


@dataclass(frozen=True)
class _Recorded:
    inputs: DraftInputs
    steps: tuple[Any, ...]
    replay: Callable[[], None]
    fingerprint: Mapping[str, object] | None


class EagleDraftGraphRunner:
    """Runs an EAGLE draft chain, all steps and their metadata in one CUDA graph a bucket.

    Args:
        draft_model: a `DraftModel`, or several by variant name, for batches that name one.
        metadata: a `MetadataProvider`.
        num_steps: tokens drafted a request, the batch's own first token included; num_steps - 1 forwards.
        topk: 1. Drafts are chains: branches do not lie next to each other in the request table, which the metadata of
            a draft step takes for granted.
        hidden_size, hidden_dtype: of `DraftBatch.hidden_states`.
        buckets: batch sizes to capture.
        device: where everything runs.
        executor: "cuda_graph", "eager" (the same code without graphs), or "auto": graphs on a CUDA device.
        pool: "shared": one graph memory pool for all runners of the device that share, whose replays must follow one
            another on one stream. "dedicated": a pool of its own.
        guard: "capture": inspect every region before it is captured, and watch the capture. "replay": also compare all
            addresses before every replay (slow). "off": neither.
        group: a `torch.distributed` group whose ranks draft together; the bucket then comes from the largest batch of
            all ranks, reduced at every call that is not given `group_batch_size`.

    One thread at a time; replays on one stream. What an engine guarantees, and may rely on: docs/graph_runner.md.

    Raises:
        ValueError: an argument is not as above.
    """

    def __init__(
        self,
        draft_model: DraftModel | Mapping[str, DraftModel],
        metadata: MetadataProvider,
        *,
        num_steps: int,
        topk: int = 1,
        hidden_size: int,
        hidden_dtype: torch.dtype,
        buckets: BucketPolicy,
        device: torch.device | str,
        executor: str = "auto",
        pool: str = "shared",
        guard: str = "capture",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._device = check_options(num_steps, topk, hidden_size, hidden_dtype, buckets, device, pool, guard)
        self._models = check_variants(draft_model)
        if not isinstance(metadata, MetadataProvider):
            raise ValueError(f"metadata: expected the methods of MetadataProvider, got {type(metadata).__name__}")
        self.executor = resolve_executor(executor, self._device)
        self.num_steps, self.topk, self.buckets = num_steps, topk, buckets
        self.hidden_size, self.hidden_dtype = hidden_size, hidden_dtype
        self._metadata, self._pool, self._guard = metadata, pool, guard
        self._group = None if group is None else RankGroup(group, self._device)
        self._buffers = StaticBuffers(buckets.largest, num_steps, hidden_size, hidden_dtype, self._device)
        self._recorded: dict[GraphKey, _Recorded] = {}
        self._executor: Executor | None = None

    @torch.no_grad()
    def capture(self, progress: Progress | None = None) -> CaptureReport[GraphKey]:
        """Captures all buckets, the largest first, so that the memory pool of one serves all. Every rank must call it.

        Runs the draft model on padding only: request 0, slot 0, length 1. A second capture replaces the first, whose
        graphs and memory are given up before it begins.

        Args:
            progress: called with (done, total, what) before each bucket and at the end; see `TextBar`.

        Raises:
            GuardError: a region is not fit to be replayed. No graph is left.
        """
        self.release()
        if self._group is not None:
            self._group.expect_same("buckets, num_steps", (*self.buckets.buckets, self.num_steps))
        keys = [
            GraphKey(size, self.topk, self.num_steps, variant)
            for size in sorted(self.buckets.buckets, reverse=True)
            for variant in self._models
        ]
        self._executor = executor = self._new_executor()

        def record(key: GraphKey) -> None:
            self._recorded[key] = self._record(key, executor)

        def describe(key: GraphKey) -> str:
            return f"batch size {key.batch_size} {key.variant}".rstrip()

        return capture_all(keys, record, executor, self.release, describe, progress)

    def release(self) -> None:
        """Gives up all graphs and their memory; `capture` may follow."""
        self._recorded.clear()
        if self._executor is not None:
            self._executor.close()
        self._executor = None

    def can_run(self, batch: DraftBatch, group_batch_size: int | None = None) -> tuple[bool, str]:
        """Whether a bucket serves `batch`, and if not, why. With a group and no size given, every rank must call it.

        Args:
            batch: the batch.
            group_batch_size: the largest batch of all ranks, where they know it.
        """
        try:
            size = self._agree(batch, group_batch_size)
        except ValueError as error:
            return False, str(error)
        reason = self._why_no_bucket(batch, size)
        return not reason, reason

    def replay(self, batch: DraftBatch, group_batch_size: int | None = None, clone: bool = False) -> DraftOutput:
        """Drafts for `batch`: in the smallest bucket that holds it, or without a graph where none does.

        Nothing waits for the device (unless a group of GPUs has to agree on a size). The batch is read on the current
        stream and never changed.

        Args:
            batch: the batch. With a size of 0 the rank is idle and replays padding only, so that collectives match.
            group_batch_size: the largest batch of all ranks, where they know it. Every rank must give the same.
            clone: return tensors of their own instead of views that the next replay overwrites.

        Returns:
            Rows of the live requests only; `fallback_reason` says why no bucket served it.

        Raises:
            ValueError: the batch does not fit this runner. With a group, every rank raises, before any launch.
            GuardError: guard "replay" found a changed address.
        """
        size = self._agree(batch, group_batch_size)
        if not size:
            return self._buffers.output(0)
        with torch.no_grad():
            output = self._replay(batch, size)
        return output.clone() if clone else output

    def _replay(self, batch: DraftBatch, size: int) -> DraftOutput:
        recorded = self._lookup(batch, size)
        if recorded is None:
            return self._run_without_graph(batch, size)
        if recorded.fingerprint is not None:
            expect_unchanged(recorded.fingerprint, self._fingerprint(recorded.inputs, recorded.steps, batch.variant))
        self._buffers.load(recorded.inputs, batch)
        if self.num_steps > 1:
            self._metadata.prepare_draft(recorded.inputs, batch.batch_size)
        recorded.replay()
        return self._buffers.output(batch.batch_size)

    def poison_padding(self) -> None:
        """Fills all inputs and outputs with values that no batch has; see `check_lane_poison`."""
        self._buffers.poison()

    def _new_executor(self) -> Executor:
        guarded = self._guard != "off"
        if self.executor == "eager":
            return EagerExecutor(self._device, guarded)
        # The watchdog thread of a collective library queries events, which "global" forbids to all threads.
        error_mode = "global" if self._group is None else "thread_local"
        return CudaGraphExecutor(self._device, self._pool, guarded, error_mode)

    def _record(self, key: GraphKey, executor: Executor) -> _Recorded:
        model = self._models[key.variant]
        inputs = self._buffers.inputs(key.batch_size)
        self._buffers.load(inputs, DraftBatch.idle(self.hidden_size, self.hidden_dtype, self._device))
        steps: tuple[Any, ...] = ()
        if self.num_steps > 1:
            steps = tuple(self._metadata.bind_draft(inputs))
            self._metadata.prepare_draft(inputs, 0)
        out = self._buffers.draft_tokens[: key.batch_size], self._buffers.scores[: key.batch_size]

        def region() -> None:
            if steps:
                self._metadata.record_draft(inputs)
            run_draft_chain(model, inputs, steps, out)

        replay = executor.record(region)
        fingerprint = self._fingerprint(inputs, steps, key.variant) if self._guard == "replay" else None
        return _Recorded(inputs, steps, replay, fingerprint)

    def _fingerprint(self, inputs: DraftInputs, steps: tuple[Any, ...], variant: str) -> Mapping[str, object]:
        """Everything that a graph reads or writes at a fixed address, as far as it can be seen."""
        found: dict[str, object] = {}
        captured = replace(inputs, seq_lens_cpu=None)  # host memory, which no graph holds
        for name, value in (("draft_model", self._models[variant]), ("inputs", captured), ("metadata.steps", steps)):
            found |= addresses(name, value)
        if self.num_steps > 1:
            found["metadata.draft_fingerprint()"] = self._metadata.draft_fingerprint()
        return found

    def _agree(self, batch: DraftBatch, group_batch_size: int | None) -> int:
        """The size that the bucket comes from: this batch's, or the largest of all ranks."""
        refusal = self._refusal(batch, group_batch_size)
        if self._group is not None and group_batch_size is None:
            return self._group.largest(0 if refusal else batch.batch_size, refusal)
        if refusal:
            raise ValueError(refusal)
        return batch.batch_size if group_batch_size is None else group_batch_size

    def _refusal(self, batch: object, group_batch_size: int | None) -> str:
        """Why this runner cannot run `batch` at all, or ""."""
        if not isinstance(batch, DraftBatch):
            return f"batch: expected a DraftBatch, got {type(batch).__name__}"
        if batch.topk != self.topk:
            return f"topk_p: expected {self.topk} column, got {batch.topk}"
        hidden = batch.hidden_states
        if hidden.dtype != self.hidden_dtype or hidden.shape[1] != self.hidden_size:
            return (
                f"hidden_states: expected {self.hidden_dtype} [B, {self.hidden_size}], got {hidden.dtype} "
                f"{list(hidden.shape)}"
            )
        if batch.num_steps not in (None, self.num_steps):
            return f"out_cache_loc: expected slots for {self.num_steps} steps, got slots for {batch.num_steps}"
        if batch.variant not in self._models:
            return f"variant: expected one of {sorted(self._models)}, got {batch.variant!r}"
        if group_batch_size is not None and (type(group_batch_size) is not int or group_batch_size < batch.batch_size):
            return (
                f"group_batch_size: expected an int, at least this rank's {batch.batch_size}, got {group_batch_size!r}"
            )
        for name, device in batch.devices.items():
            if device != self._device:
                return f"{name}: expected a tensor on {self._device}, got one on {device}"
        return ""

    def _lookup(self, batch: DraftBatch, size: int) -> _Recorded | None:
        bucket = self.buckets.bucket_for(size)
        return (
            None if bucket is None else self._recorded.get(GraphKey(bucket, batch.topk, self.num_steps, batch.variant))
        )

    def _why_no_bucket(self, batch: DraftBatch, size: int) -> str:
        if self.buckets.bucket_for(size) is None:
            return f"batch size {size}: expected at most {self.buckets.largest}, the largest bucket"
        if size and self._lookup(batch, size) is None:
            return "no graph: expected capture() to have run"
        return ""

    def _run_without_graph(self, batch: DraftBatch, size: int) -> DraftOutput:
        """In memory of its own, padded only as far as all ranks agreed."""
        inputs = exact_inputs(batch, -(-size // self.buckets.multiple) * self.buckets.multiple, self.num_steps)
        steps = tuple(self._metadata.build_draft(inputs)) if self.num_steps > 1 else ()
        tokens, scores = run_draft_chain(self._models[batch.variant], inputs, steps)
        raw = batch.batch_size
        parents = (torch.arange(self.num_steps, device=self._device) - 1).repeat(raw, 1)
        return DraftOutput(tokens[:raw], parents, scores[:raw], self._why_no_bucket(batch, size))
