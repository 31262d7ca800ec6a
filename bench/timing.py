"""Times GPU work by replaying it from a CUDA graph, and the host's share of an eager call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, 10th and 90th percentile on the GPU, median on the host.

    What was not measured (the GPU's share on a CPU) is None.
    """

    gpu_us: float | None
    gpu_p10_us: float | None
    gpu_p90_us: float | None
    host_us: float


def measure(fn: Callable[[], object], device: torch.device) -> Timing:
    """Times `fn`, which enqueues work on `device` and can be captured in a CUDA graph."""
    if device.type != "cuda":
        return Timing(None, None, None, host_us(fn, device))
    samples = sorted(graph_us(fn))
    tenth = len(samples) // 10
    return Timing(statistics.median(samples), samples[tenth], samples[-1 - tenth], host_us(fn, device))


def graph_us(fn: Callable[[], object], calls: int = 20, replays: int = 50) -> list[float]:
    """GPU microseconds of a call of `fn`, one sample a replay of a graph that holds `calls` of them, back to back.

    Calls that use programmatic dependent launch overlap a little, as they do behind each other on a stream.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept = []  # outputs that a call allocates live as long as the graph
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            kept.append(fn())
    # Clocks rise under load, within some milliseconds.
    warm_until = time.perf_counter() + 0.05
    while time.perf_counter() < warm_until:
        graph.replay()
        torch.cuda.synchronize()
    samples = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / calls)
    return samples


def host_us(fn: Callable[[], object], device: torch.device, rounds: int = 20) -> float:
    """Host microseconds until an eager call returns; median over rounds that each begin with an idle device."""
    fn()
    samples = []
    calls = 10 if device.type == "cuda" else 1
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            fn()
        samples.append((time.perf_counter() - begin) * 1e6 / calls)
    return statistics.median(samples)


def count_launches(fn: Callable[[], object]) -> int:
    """Kernels, copies and fills that one call of `fn` puts on the GPU.

    Call it after everything is timed: once a profiler has run in a process, every launch takes longer.
    """
    return len(_gpu_events(fn))


def kernel_us(fn: Callable[[], object], names: Sequence[str]) -> float:
    """GPU microseconds of the kernels with these names in one call of `fn`, in graphs that it replays, too.

    Call it after everything is timed, as `count_launches`.
    """
    return sum(event.device_time_total for event in _gpu_events(fn) if event.name in names)


def _gpu_events(fn: Callable[[], object]) -> list[Any]:
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        fn()
        torch.cuda.synchronize()
    return [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
