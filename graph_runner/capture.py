"""Executors: what it takes to record a region once and run it again. One records CUDA graphs, one just calls it."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch

from dsv4_graph_runner.device import normal_device
from dsv4_graph_runner.guard import inspect_region, pool_bytes, watch_capture
from dsv4_graph_runner.report import CaptureReport, Key

POOLS = ("shared", "dedicated")
WARMUPS = 2
Progress = Callable[[int, int, str], None]


class GraphPool:
    """A graph memory pool and the stream that captures into it. Graphs of one pool must not run at the same time.

    All pools of a device capture on one stream: libraries keep a workspace for each stream that they ever saw (cuBLAS
    32 MiB), which a stream for each pool would leave behind.
    """

    _shared: ClassVar[weakref.WeakValueDictionary[int, GraphPool]] = weakref.WeakValueDictionary()
    _streams: ClassVar[dict[int, torch.cuda.Stream]] = {}

    def __init__(self, device: torch.device) -> None:
        self.device = normal_device(device)
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.stream = self._streams.get(self.device.index) or torch.cuda.Stream(self.device)
        self._streams[self.device.index] = self.stream

    @classmethod
    def shared(cls, device: torch.device) -> GraphPool:
        """The pool of all runners on `device` that share; a new one when nobody holds it any more.

        A pool whose graphs are all gone cannot be captured into again, so its handle must not outlive its users.
        """
        index = device.index
        pool = cls._shared.get(index)
        if pool is None:
            pool = cls._shared[index] = cls(device)
        return pool

    def bytes(self) -> int:
        return pool_bytes(self.handle, self.device)


class Executor(Protocol):
    """Records regions, largest first, and gives back what runs them again."""

    name: str

    def record(self, region: Callable[[], None]) -> Callable[[], None]:
        """Warms `region` up, records it and returns its replay."""
        ...

    def pool_bytes(self) -> int:
        """Device memory that all recorded regions hold together, in bytes."""
        ...

    def close(self) -> None:
        """Drops everything recorded."""
        ...


class EagerExecutor:
    """Runs the region itself: all the logic without a graph, on any device."""

    name = "eager"

    def __init__(self, device: torch.device, guarded: bool) -> None:
        self._device, self._guarded = device, guarded

    def record(self, region: Callable[[], None]) -> Callable[[], None]:
        region()
        if self._guarded:
            inspect_region(region, self._device)
        return region

    def pool_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class CudaGraphExecutor:
    """Records the region in a CUDA graph.

    Args:
        device: a CUDA device.
        pool: "shared": one memory pool for all runners of the device that share, so that their graphs must not run at
            the same time, nor in two streams. "dedicated": a pool of this executor's own.
        guarded: inspect the region before it is captured, and watch the capture.
        error_mode: torch's `capture_error_mode`: "global" also catches unsafe calls of other threads; "thread_local"
            lets them be, as a collective library's watchdog needs.
    """

    name = "cuda_graph"

    def __init__(self, device: torch.device, pool: str, guarded: bool, error_mode: str) -> None:
        self._device, self._guarded, self._error_mode = device, guarded, error_mode
        gc.collect()  # graphs and tensors that only a cycle keeps would count as memory in use
        with torch.cuda.device(device):
            self._pool = GraphPool.shared(device) if pool == "shared" else GraphPool(device)
            self._bytes_before = self._pool.bytes()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, region: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            graph = capture_graph(
                region, self._device, pool=self._pool, guarded=self._guarded, error_mode=self._error_mode
            )
        self._graphs.append(graph)
        return graph.replay

    def pool_bytes(self) -> int:
        return self._pool.bytes() - self._bytes_before

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


def capture_graph(
    region: Callable[[], Any],
    device: torch.device | str,
    *,
    pool: GraphPool | None = None,
    guarded: bool = True,
    error_mode: str = "global",
) -> torch.cuda.CUDAGraph:
    """Captures any callable: warm-up, inspection, synchronisation, then the capture, watched.

    Args:
        region: enqueues work on the current stream. What it returns is not kept, so results go to buffers of its own.
        device: where.
        pool: memory for the graph; None: a pool of its own.
        guarded: whether to inspect and watch; see `dsv4_graph_runner.guard`.
        error_mode: torch's `capture_error_mode`.

    Raises:
        GuardError: the region is not fit to be replayed. Nothing is left captured.
    """
    device = normal_device(device)
    pool = pool or GraphPool(device)
    pool.stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(pool.stream):
        for _ in range(WARMUPS):
            region()
        if guarded:
            inspect_region(region, device)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    watch = watch_capture(pool.handle, device) if guarded else contextlib.nullcontext()
    failure: BaseException | None = None
    with _current_stream_restored(device), _no_collection():
        try:
            with torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode=error_mode):
                try:
                    with watch:
                        region()
                except BaseException as error:
                    failure = error
                    raise
        except RuntimeError as error:
            if failure is None or error is failure:
                raise
            # The end of a broken capture raises, too, and would hide what broke it.
            raise failure from error
    torch.cuda.synchronize(device)
    return graph


@contextlib.contextmanager
def _current_stream_restored(device: torch.device) -> Iterator[None]:
    """A capture that fails at its end leaves its own stream the current one."""
    before = torch.cuda.current_stream(device)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection during a capture: freeing what it finds may call what a capture forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture_all(
    keys: Sequence[Key],
    record: Callable[[Key], None],
    executor: Executor,
    release: Callable[[], None],
    describe: Callable[[Key], str],
    progress: Progress | None,
) -> CaptureReport[Key]:
    """Records a region for each key in turn, and says what each took; after an exception nothing recorded is left.

    Args:
        keys: the largest first, so that the memory of one serves all.
        record: records one with `executor`, and keeps it.
        release: gives up all that `record` kept.
        describe: names one for `progress`, which is called with (done, total, what) before each and at the end.
    """
    begin, spent = time.perf_counter(), {}
    try:
        for i, key in enumerate(keys):
            if progress is not None:
                progress(i, len(keys), describe(key))
            before, start = executor.pool_bytes(), time.perf_counter()
            record(key)
            spent[key] = executor.pool_bytes() - before, time.perf_counter() - start
    except BaseException:
        release()
        raise
    if progress is not None:
        progress(len(keys), len(keys), "")
    return CaptureReport(executor.name, time.perf_counter() - begin, executor.pool_bytes(), spent)
