"""What a measurement of an engine needs: kernels that are compiled, and the GPU time of metadata in its graphs."""

from __future__ import annotations

from dsv4_bench.timing import kernel_us
from dsv4_examples.hf_dsv4.engine import Engine, Statistics

METADATA_KERNELS = (
    "_build_metadata_kernel",
    "_plan_decode_kernel",
    "_plan_prefill_kernel",
    "_plan_prefill_chunked_kernel",
)


def warm_up(engine: Engine) -> None:
    """Serves one request and forgets that: what is compiled or loaded at first use is there."""
    prompt = max(1, min(engine.chunk_size + 1, engine.max_len - 2))
    engine.add([0] * prompt, min(2, engine.max_len - prompt))
    engine.run()
    engine.statistics = Statistics()


def metadata_us(engine: Engine, steps: int = 5) -> list[float]:
    """GPU microseconds of metadata and plans, of drafts, too, in graphs of as many requests as run at a time.

    Args:
        engine: with nothing to do, captured, its executor "cuda_graph"; requests may have 33 tokens. Nothing should be
            timed afterwards: once a profiler has run in a process, every launch takes longer.
        steps: how many steps to measure; fewer, or none, where `max_len` has no room for `max_requests` requests to run
            side by side for so long.

    Returns:
        A sample a step, ascending.
    """
    width, prompt = 1 + engine.num_drafts, 32
    prefill_steps = -(-engine.max_requests * prompt // engine.chunk_size)
    new = min(engine.max_len - prompt, prefill_steps + (steps + 1) * width)
    for index in range(engine.max_requests):
        engine.add([index % 2] * prompt, new)
    served = engine.statistics.bucket_steps
    while engine.step() is not None and engine.statistics.bucket_steps == served:
        pass
    samples: list[float] = []
    while len(samples) < steps and len(engine.scheduler.running) == engine.max_requests:
        samples.append(kernel_us(engine.step, METADATA_KERNELS))
    engine.run()
    return sorted(samples)
