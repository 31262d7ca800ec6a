"""`dsv4 bench graph-replay`: what a replay of the draft graph runner costs beyond the draft model's own graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from dsv4_bench.draft_world import DraftWorld, output_difference
from dsv4_bench.report import Row
from dsv4_bench.timing import count_launches, graph_us, host_us
from dsv4_graph_runner import BucketPolicy, DraftBatch, DraftInputs, capture_graph
from dsv4_graph_runner.buffers import StaticBuffers
from dsv4_graph_runner.draft_loop import run_draft_chain

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
NUM_STEPS = 3
HIDDEN_SIZE = 512
WINDOW = 128


def run(
    device: torch.device, progress: Callable[[str], None], buckets: tuple[int, ...] = BUCKETS
) -> tuple[list[Row], str]:
    """Checks, then times every bucket with one lane of padding; a row each, and a line about the capture.

    Columns, in microseconds: on the GPU the input copy, the metadata, the runner's graph (which holds the metadata), a
    graph of the model alone written by hand, and what the runner adds to that; on the host the copy, the provider's
    preparation, the slicing of outputs, a whole replay, and what that adds to launching the graph written by hand; and
    an eager loop from call to result. Then launches outside the graph, and what the bucket took to capture. GPU columns
    are None on a CPU, where the eager executor stands in for graphs.

    Raises:
        RuntimeError: drafts differ from those of the eager loop.
    """
    world, twin = _make_world(device, buckets, "auto"), _make_world(device, buckets, "eager")
    progress("capture")
    report = world.runner.capture()
    twin.runner.capture()
    sizes = {key.batch_size: cost for key, cost in report.buckets.items()}
    rows = []
    for bucket in buckets:
        progress(f"bucket {bucket}")
        grown, seconds = sizes[bucket]
        rows.append(_row(world, twin, bucket) | {"capture s": seconds, "pool MiB": grown / 2**20})
    if device.type == "cuda":
        for bucket, row in zip(buckets, rows, strict=True):
            batch, buffers, inputs = _static(world, bucket)
            row["launches"] = count_launches(partial(buffers.load, inputs, batch))
    about = (
        f"us of a draft replay, {report.executor}, {NUM_STEPS} steps, hidden {HIDDEN_SIZE}, window {WINDOW}: "
        f"{len(buckets)} buckets captured "
        f"in {report.seconds:.2f} s, {report.pool_bytes / 2**20:.1f} MiB of graph memory"
    )
    return rows, about


def _make_world(device: torch.device, buckets: tuple[int, ...], executor: str) -> DraftWorld:
    return DraftWorld.make(
        "transformer",
        device,
        BucketPolicy(sizes=buckets),
        num_steps=NUM_STEPS,
        hidden_size=HIDDEN_SIZE,
        window=WINDOW,
        max_len=65_536,
        executor=executor,
        pool="dedicated",
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )


def _static(world: DraftWorld, bucket: int) -> tuple[DraftBatch, StaticBuffers, DraftInputs]:
    """A batch with one lane of padding (none in a bucket of 1), and buffers like the runner's that hold it."""
    batch = world.batches(seed=bucket).draw(max(bucket - 1, 1))
    device = batch.seq_lens.device
    buffers = StaticBuffers(bucket, NUM_STEPS, world.hidden_size, world.runner.hidden_dtype, device)
    inputs = buffers.inputs(bucket)
    buffers.load(inputs, batch)
    return batch, buffers, inputs


def _row(world: DraftWorld, twin: DraftWorld, bucket: int) -> Row:
    batch, buffers, inputs = _static(world, bucket)
    device, raw = batch.seq_lens.device, batch.batch_size
    difference = output_difference(world.runner.replay(batch), twin.runner.replay(batch))
    if difference is not None:
        raise RuntimeError(f"bucket {bucket}: {difference} (expected: the eager loop)")
    row: Row = {"case": f"B={raw} in {bucket}"}
    on_gpu = _gpu_times(world, buffers, inputs, batch)
    hand_host = on_gpu.pop("hand host")
    total = host_us(lambda: world.runner.replay(batch), device)
    row |= on_gpu | {
        "copy host": host_us(lambda: buffers.load(inputs, batch), device),
        "prep host": host_us(lambda: world.metadata.prepare_draft(inputs, raw), device),
        "out host": host_us(lambda: buffers.output(raw), device),
        "all host": total,
        "extra host": None if hand_host is None else total - hand_host,
        "eager": _wall_us(lambda: twin.runner.replay(batch), device),
        "launches": None,
    }
    return row


def _gpu_times(world: DraftWorld, buffers: StaticBuffers, inputs: DraftInputs, batch: DraftBatch) -> Row:
    """GPU microseconds of each part; `extra` is all that the model's own graph, written by hand, doesn't have."""
    names = ("copy gpu", "meta gpu", "graph gpu", "hand gpu", "extra gpu", "hand host")
    device = batch.seq_lens.device
    if device.type != "cuda":
        return dict.fromkeys(names)
    steps = world.metadata.bind_draft(inputs)
    world.metadata.record_draft(inputs)
    size = inputs.batch_size
    out = buffers.draft_tokens[:size], buffers.scores[:size]

    def region() -> None:
        world.metadata.record_draft(inputs)
        run_draft_chain(world.model, inputs, steps, out)

    own = capture_graph(region, device)
    slots = inputs.out_cache_loc.view(size, NUM_STEPS).t().contiguous()
    hand, by_hand = _hand_written(lambda: _hand_loop(world, inputs, slots, steps))
    own.replay()
    hand.replay()
    if not torch.equal(out[0], by_hand[0]):
        raise RuntimeError(f"bucket {size}: drafts differ from those of the graph written by hand")
    copy = statistics.median(graph_us(lambda: buffers.load(inputs, batch)))
    metadata = statistics.median(graph_us(lambda: world.metadata.record_draft(inputs)))
    replay, alone = _replay_us(own), _replay_us(hand)
    values = (copy, metadata, replay, alone, copy + replay - alone, host_us(hand.replay, device))
    return dict(zip(names, values, strict=True))


def _hand_loop(
    world: DraftWorld, inputs: DraftInputs, slots: torch.Tensor, steps: list
) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft loop as one would write it for one batch size, with slots and metadata that are there already."""
    tokens, scores, hidden = [inputs.topk_index[:, 0]], [inputs.topk_p[:, 0]], inputs.hidden_states
    for i in range(NUM_STEPS - 1):
        logits, hidden = world.model.forward(tokens[i], hidden, inputs.positions + i, slots[i], steps[i])
        token = logits.argmax(dim=-1)
        tokens.append(token)
        scores.append(scores[i] * torch.softmax(logits, -1, dtype=torch.float32).gather(1, token[:, None])[:, 0])
    return torch.stack(tokens, 1), torch.stack(scores, 1)


def _hand_written(
    fn: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = fn()
    return graph, out


def _replay_us(graph: torch.cuda.CUDAGraph, replays: int = 10, rounds: int = 30) -> float:
    """GPU microseconds of a replay, back to back; median over rounds."""
    samples = []
    for i in range(rounds + 5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 5:  # clocks rise under load
            samples.append(begin.elapsed_time(end) * 1e3 / replays)
    return statistics.median(samples)


def _wall_us(fn: Callable[[], object], device: torch.device, rounds: int = 20) -> float:
    """Microseconds from the call until its result is there; median."""
    samples = []
    for i in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= 2:
            samples.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(samples)
