"""Whole steps of a model in CUDA graphs: decode, or verification of as many drafts for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_graph_runner.batch import expect_tensor
from dsv4_graph_runner.buckets import BucketPolicy
from dsv4_graph_runner.capture import CudaGraphExecutor, EagerExecutor, Executor, Progress, capture_all
from dsv4_graph_runner.device import normal_device
from dsv4_graph_runner.options import resolve_executor
from dsv4_graph_runner.protocols import StepBatch, StepInputs, StepProvider
from dsv4_graph_runner.report import CaptureReport

StepModel = Callable[[torch.Tensor, Any], Sequence[torch.Tensor]]


@dataclass(frozen=True, eq=False)
class StepOutput:
    """What a model returned for the live rows.

    Attributes:
        tensors: [T, ...] each, in the model's order. Valid until the next replay or capture of the runner.
        fallback_reason: why no bucket served the batch, which then ran without padding and without a graph; None where
            one did.
    """

    tensors: tuple[torch.Tensor, ...]
    fallback_reason: str | None = None


@dataclass(frozen=True)
class _Recorded:
    inputs: StepInputs
    replay: Callable[[], None]


class StepGraphRunner:
    """Runs a model's step, metadata and all layers, in one CUDA graph a bucket of batch sizes.

    Args:
        model: called as model(ids, meta) with int64 [rows] tokens and the provider's metadata of these rows; returns
            tensors [rows, ...], always as many and of the same shapes but for the rows. It is recorded: no sync, no
            copy from the host, no state outside the cache. What it returns is copied to memory of the runner's own, so
            it should return no more than the engine reads.
        provider: a `StepProvider`, `dsv4_backend.DSV4AttnBackend` for one.
        mode: of the batches.
        width: rows of each request: 1 to decode, the drafts and one more to verify.
        buckets: batch sizes to capture.
        device: where everything runs.
        executor: "cuda_graph", "eager" (the same code without graphs), or "auto": graphs on a CUDA device.

    Graphs share the memory pool of all runners of the device, whose replays must follow one another on one stream. A
    region is inspected before it is captured, and the capture is watched (`dsv4_graph_runner.guard`); without graphs
    there is nothing to guard. One thread at a time.

    Raises:
        ValueError: an argument is not as above.
    """

    def __init__(
        self,
        model: StepModel,
        provider: StepProvider,
        *,
        mode: Any,
        width: int = 1,
        buckets: BucketPolicy,
        device: torch.device | str,
        executor: str = "auto",
    ) -> None:
        if not callable(model):
            raise ValueError(f"model: expected something to call, got {type(model).__name__}")
        if not isinstance(provider, StepProvider):
            raise ValueError(f"provider: expected the methods of StepProvider, got {type(provider).__name__}")
        if type(width) is not int or width < 1:
            raise ValueError(f"width: expected an int of at least 1, got {width!r}")
        if not isinstance(buckets, BucketPolicy):
            raise ValueError(f"buckets: expected a BucketPolicy, got {type(buckets).__name__}")
        self._device = normal_device(device)
        self.executor = resolve_executor(executor, self._device)
        self.mode, self.width, self.buckets = mode, width, buckets
        self._model, self._provider = model, provider
        self._recorded: dict[int, _Recorded] = {}
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._executor: Executor | None = None

    @torch.no_grad()
    def capture(self, progress: Progress | None = None) -> CaptureReport[int]:
        """Captures all buckets, the largest first, so that the memory pool of one serves all.

        Runs the model on padding only. A second capture replaces the first, whose graphs and memory are given up before
        it begins.

        Args:
            progress: called with (done, total, what) before each bucket and at the end; see `TextBar`.

        Raises:
            GuardError: the model is not fit to be replayed. No graph is left.
            ValueError: the model returned something else than tensors of as many rows.
        """
        self.release()
        sizes = sorted(self.buckets.buckets, reverse=True)
        graphs = self.executor == "cuda_graph"
        executor: Executor = (
            CudaGraphExecutor(self._device, "shared", True, "global") if graphs else EagerExecutor(self._device, False)
        )
        self._executor = executor

        def record(size: int) -> None:
            self._recorded[size] = self._record(size, executor)

        def describe(size: int) -> str:
            return f"{_name(self.mode)} batch size {size}"

        return capture_all(sizes, record, executor, self.release, describe, progress)

    def release(self) -> None:
        """Gives up all graphs and their memory; `capture` may follow."""
        self._recorded.clear()
        self._outputs = ()
        if self._executor is not None:
            self._executor.close()
        self._executor = None

    def can_run(self, batch: StepBatch) -> tuple[bool, str]:
        """Whether a bucket serves `batch`, and if not, why."""
        reason = self._why_no_bucket(batch)
        return not reason, reason

    @torch.no_grad()
    def replay(self, batch: StepBatch, ids: torch.Tensor) -> StepOutput:
        """Runs a step in the smallest bucket that holds it, or without a graph where none does.

        Nothing waits for the device, and in a bucket nothing is allocated; the copy of the inputs and the graph are all
        that is launched. Batch and ids are read on the current stream and never changed.

        Args:
            batch: the batch. Of another mode or width than the runner's, it runs without a graph.
            ids: int32 or int64 [T], on the device: the rows' tokens.

        Returns:
            Rows of the batch. An empty batch of a captured runner launches nothing; a rank that has to take part in
            other ranks' collectives replays a batch of padding.

        Raises:
            ValueError: before anything is launched or changed: the batch can't be run at all.
        """
        size = batch.batch_size
        reason = self._why_no_bucket(batch)
        if reason:
            self._check_ids(ids, batch.num_rows)
            return StepOutput(tuple(self._model(ids.long(), self._provider.prepare(batch))), reason)
        if size:
            bucket = self.buckets.bucket_for(size)
            assert bucket is not None
            recorded = self._recorded[bucket]
            self._provider.load(recorded.inputs, batch, ids)
            recorded.replay()
        return StepOutput(tuple(out[: size * self.width] for out in self._outputs))

    def _record(self, size: int, executor: Executor) -> _Recorded:
        inputs = self._provider.bind(self.mode, size, self.width)
        rows = size * self.width
        returned = self._returned(inputs, rows)
        if not self._outputs:
            self._outputs = _like(returned)
        wanted = [(out.shape[1:], out.dtype) for out in self._outputs]
        if [(each.shape[1:], each.dtype) for each in returned] != wanted:
            raise ValueError(f"model: expected tensors like those of the largest bucket, {wanted}, got others")
        outputs = [out[:rows] for out in self._outputs]

        def region() -> None:
            self._provider.record(inputs)
            for out, value in zip(outputs, self._model(inputs.ids, inputs.meta), strict=True):
                out.copy_(value)

        return _Recorded(inputs, executor.record(region))

    def _returned(self, inputs: StepInputs, rows: int) -> Sequence[torch.Tensor]:
        """What the model returns for padding."""
        returned = self._model(inputs.ids, inputs.meta)
        if not isinstance(returned, (tuple, list)) or not all(isinstance(each, torch.Tensor) for each in returned):
            raise ValueError(f"model: expected it to return a tuple of tensors, got {type(returned).__name__}")
        for i, each in enumerate(returned):
            if not each.ndim or each.shape[0] != rows:
                raise ValueError(f"model: expected {rows} rows in tensor {i}, got shape {list(each.shape)}")
        return returned

    def _check_ids(self, ids: torch.Tensor, num_rows: int) -> None:
        expect_tensor("ids", ids, (torch.int32, torch.int64), 1, (num_rows,))
        if ids.device != self._device:
            raise ValueError(f"ids: expected tokens on {self._device}, got {ids.device}")

    def _why_no_bucket(self, batch: StepBatch) -> str:
        size = batch.batch_size
        if size:
            if batch.mode != self.mode:
                return f"mode {_name(batch.mode)}: expected {_name(self.mode)}"
            if batch.ragged or batch.num_rows != size * self.width:
                return f"{batch.num_rows} rows for {size} requests: expected {self.width} each"
        if self.buckets.bucket_for(size) is None:
            return f"batch size {size}: expected at most {self.buckets.largest}, the largest bucket"
        return "" if self._recorded else "no graph: expected capture() to have run"


@torch.inference_mode(False)
def _like(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Memory for as many values, which can be written in and out of inference mode."""
    return tuple(torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in tensors)


def _name(mode: Any) -> str:
    return str(getattr(mode, "value", mode))
