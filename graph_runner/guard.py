"""Finds, at capture, what would make a CUDA graph wrong or slow at replay: syncs, copies from the host, stray memory.

`inspect_region` runs any callable once, without a graph, and fails at the first offending operation, before a capture
is begun that it would break. `watch_capture` watches the capture itself.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_graph_runner.device import normal_device

aten = torch.ops.aten

# What reads a result back to the host, by what the operation is for.
_READS_BACK = {
    aten._local_scalar_dense: "reads a value on the host (item, int, bool, tolist)",
    aten.nonzero: "has an output whose size depends on values (nonzero, where with one argument)",
    aten.masked_select: "has an output whose size depends on values",
    aten._unique2: "has an output whose size depends on values",
    aten.unique_dim: "has an output whose size depends on values",
    aten.unique_consecutive: "has an output whose size depends on values",
    aten.bincount: "has an output whose size depends on values",
    aten.equal: "compares tensors on the host",
}
_COPIES = (aten.copy_, aten._to_copy)
_INDEXING = (aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_)
_PACKAGE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent


class GuardError(RuntimeError):
    """A region is not fit to be replayed, or a replay would not be what was captured.

    Attributes:
        kind: "sync", "host copy", "outside pool", "address" or "poison".
        where: "file:line in function: source line" of the caller's code, or "" where no line is to blame.
    """

    def __init__(self, kind: str, what: str, where: str = "") -> None:
        super().__init__(f"{kind}: {what}{f', at {where}' if where else ''}")
        self.kind, self.where = kind, where


def inspect_region(fn: Callable[[], Any], device: torch.device | str) -> Any:
    """Runs `fn` once, without a graph, and fails if it could not be captured and replayed as it is.

    Found are: waiting for the device and reading values back, explicit synchronisation, and copies to the device from
    pageable host memory or from pinned memory that does not outlive the call. On a CPU, where nothing waits, values
    read on the host are found: the same code would wait on a GPU.

    Args:
        fn: what is to be captured. It runs for real, so its inputs must be ready.
        device: where its work goes.

    Returns:
        What `fn` returns.

    Raises:
        GuardError: with the caller's line. The sync debug mode of torch, which this uses, is as before.
    """
    device = normal_device(device)
    mode = _RegionMode(device)
    with _no_explicit_sync(), _sync_errors(device):
        try:
            with mode:
                result = fn()
        except RuntimeError as error:
            if isinstance(error, GuardError) or "synchronizing CUDA operation" not in str(error):
                raise
            raise GuardError("sync", "waits for the device", _where(error.__traceback__)) from error
    mode.check_pinned()
    return result


@contextlib.contextmanager
def watch_capture(pool: tuple[int, int], device: torch.device | str) -> Iterator[None]:
    """Use it around the region, inside `torch.cuda.graph`: fails if memory comes from anywhere but the graph's pool.

    Work on a stream that is not part of the capture is found at its line. What no operation of torch shows (an
    extension that allocates) is found by comparing the allocator's books, without a line.

    Args:
        pool: of the graph.
        device: the CUDA device.

    Raises:
        GuardError: of kind "outside pool".
    """
    device = normal_device(device)
    before = _bytes_outside(pool, device)
    with _RegionMode(device, capturing=True), _no_explicit_sync():
        yield
    grown = _bytes_outside(pool, device) - before
    if grown > 0:
        raise GuardError("outside pool", f"the region keeps {grown} bytes that it did not take from the graph's pool")


def pool_bytes(pool: tuple[int, int], device: torch.device) -> int:
    """Device memory that a graph memory pool holds, in bytes."""
    return sum(segment["total_size"] for segment in _segments(device) if _pool_of(segment) == tuple(pool))


def _bytes_outside(pool: tuple[int, int], device: torch.device) -> int:
    return sum(segment["allocated_size"] for segment in _segments(device) if _pool_of(segment) != tuple(pool))


def _segments(device: torch.device) -> list[dict[str, Any]]:
    return [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == device.index]


def _pool_of(segment: dict[str, Any]) -> tuple[int, ...]:
    return tuple(segment["segment_pool_id"])


@dataclass(frozen=True)
class _PinnedCopy:
    source: StorageWeakRef
    where: str


class _RegionMode(TorchDispatchMode):
    """Sees every operation of the region before it runs."""

    def __init__(self, device: torch.device, capturing: bool = False) -> None:
        super().__init__()
        self._device, self._capturing = device, capturing
        self._pinned: list[_PinnedCopy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        here = any(tensor.device.type == self._device.type for tensor in tensors)
        if here and packet in _READS_BACK:
            raise GuardError("sync", f"{func} {_READS_BACK[packet]}", _where())
        if here and packet in _INDEXING and _has_mask(args):
            raise GuardError("sync", f"{func} with a mask has a size that depends on values", _where())
        if packet in _COPIES and not self._capturing and self._device.type != "cpu":
            self._check_copy(func, packet, args, kwargs)
        result = func(*args, **kwargs)
        if self._capturing and not torch.cuda.is_current_stream_capturing() and _on_device(result, self._device):
            raise GuardError("outside pool", f"{func} runs on a stream that is not being captured", _where())
        return result

    def _check_copy(self, func: Any, packet: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if packet is aten.copy_:
            to, source = args[0].device, args[1]
        else:
            source = args[0]
            to = torch.device(kwargs["device"]) if kwargs.get("device") is not None else source.device
        if source.device.type == self._device.type and to.type == "cpu":
            raise GuardError("sync", f"{func} copies a result to the host", _where())
        if source.device.type != "cpu" or to.type != self._device.type:
            return
        if not source.is_pinned():
            raise GuardError("host copy", f"{func} copies from pageable host memory", _where())
        self._pinned.append(_PinnedCopy(StorageWeakRef(source.untyped_storage()), _where()))

    def check_pinned(self) -> None:
        """Once the region has returned, what was pinned for the call only is gone."""
        for copy in self._pinned:
            if copy.source.expired():
                raise GuardError("host copy", "copies from pinned host memory that is freed after the call", copy.where)


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    masks = [index for index in indices if isinstance(index, torch.Tensor)]
    return any(index.dtype in (torch.bool, torch.uint8) for index in masks)


def _on_device(result: Any, device: torch.device) -> bool:
    found = result if isinstance(result, (list, tuple)) else [result]
    return any(isinstance(each, torch.Tensor) and each.device.type == device.type for each in found)


@contextlib.contextmanager
def _sync_errors(device: torch.device) -> Iterator[None]:
    """Makes torch raise where an operation waits; the mode before is restored."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_mode("error")
    try:
        yield
    finally:
        _set_sync_mode(before)


def _set_sync_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def _no_explicit_sync() -> Iterator[None]:
    """Makes explicit waiting raise, which torch's sync debug mode lets pass."""
    places = [(torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize")]
    saved = [getattr(owner, name) for owner, name in places]

    def refuse(*args: object, **kwargs: object) -> None:
        raise GuardError("sync", "waits for the device explicitly (synchronize)", _where())

    for owner, name in places:
        setattr(owner, name, refuse)
    try:
        yield
    finally:
        for (owner, name), original in zip(places, saved, strict=True):
            setattr(owner, name, original)


def _where(tb: TracebackType | None = None) -> str:
    """The innermost line that is neither torch's nor this package's."""
    frames = traceback.extract_tb(tb) if tb is not None else traceback.extract_stack()
    for frame in reversed(frames):
        path = Path(frame.filename)
        if _PACKAGE not in path.parents and _TORCH not in path.parents and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""
