"""Where the runner's tests run: without graphs on a CPU, with graphs on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_bench.draft_world import DraftWorld
from dsv4_graph_runner import BucketPolicy, DraftBatch, EagleDraftGraphRunner

each_executor = pytest.mark.parametrize(
    ("executor", "device"),
    [
        pytest.param("eager", "cpu", id="eager-cpu"),
        pytest.param("cuda_graph", "cuda", marks=pytest.mark.gpu, id="graph-cuda"),
    ],
)


def make_world(model: str = "hash", device: str = "cpu", sizes: object = 8, **options: Any) -> DraftWorld:
    """A world that is captured already. `sizes`: the largest batch, or explicit buckets."""
    policy = BucketPolicy(max_batch_size=sizes) if isinstance(sizes, int) else BucketPolicy(sizes=sizes)
    world = DraftWorld.make(model, device, policy, **options)
    world.runner.capture()
    return world


def make_batch(
    lengths: list[int],
    num_steps: int = 3,
    slots: list[int] | None = None,
    device: str = "cpu",
    hidden_size: int = 128,
    **changed: Any,
) -> DraftBatch:
    """A batch with requests 1, 2, ..., and slots 100, 101, ... unless they are given."""
    size = len(lengths)
    lens = torch.tensor(lengths, dtype=torch.int64, device=device)
    if slots is None:
        slots = list(range(100, 100 + size * num_steps))
    fields: dict[str, Any] = dict(
        req_pool_indices=torch.arange(size, device=device) + 1,
        seq_lens=lens,
        positions=lens.clone(),
        out_cache_loc=torch.tensor(slots, dtype=torch.int64, device=device),
        topk_p=torch.full((size, 1), 0.5, device=device),
        topk_index=torch.arange(size, device=device)[:, None] + 5,
        hidden_states=torch.ones(size, hidden_size, device=device),
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
    )
    return DraftBatch(**(fields | changed))


def snapshot(batch: DraftBatch) -> dict[str, tuple[object, list[Any] | None]]:
    """Every field: the very object, and a copy of its values."""
    return {
        name: (value, value.tolist() if isinstance(value, torch.Tensor) else None)
        for name, value in vars(batch).items()
    }


class SpyMetadata:
    """Passes everything on to another provider, keeps what it saw, and raises where it is told to.

    Args:
        inner: the provider.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seen: list[dict[str, Any]] = []
        self.fail_in: str | None = None

    def _at(self, place: str) -> None:
        if self.fail_in == place:
            raise RuntimeError(f"injected in {place}")

    def bind_draft(self, inputs: Any) -> Any:
        self._at("bind_draft")
        return self.inner.bind_draft(inputs)

    def record_draft(self, inputs: Any) -> None:
        self._at("record_draft")
        self.inner.record_draft(inputs)

    def prepare_draft(self, inputs: Any, raw_batch_size: int) -> None:
        self.seen.append(
            {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in vars(inputs).items()}
            | {"raw_batch_size": raw_batch_size, "seq_lens_sum": inputs.seq_lens_sum}
        )
        self._at("prepare_draft")
        self.inner.prepare_draft(inputs, raw_batch_size)

    def build_draft(self, inputs: Any) -> Any:
        self._at("build_draft")
        return self.inner.build_draft(inputs)

    def draft_fingerprint(self) -> Any:
        return self.inner.draft_fingerprint()


class SpyModel:
    """Keeps what each forward was given, and raises at the forward it is told to. For runs without graphs.

    Args:
        vocab_size, hidden_size: of what it returns.
    """

    def __init__(self, vocab_size: int = 16, hidden_size: int = 128) -> None:
        self._vocab_size, self._hidden_size = vocab_size, hidden_size
        self.calls: list[dict[str, Any]] = []
        self.fail_at: int | None = None

    def values(self, name: str) -> list[list[int]]:
        """What the forwards were given as "ids", "positions" or "slots"."""
        return [call[name].tolist() for call in self.calls]

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        metadata: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fail_at == len(self.calls):
            raise RuntimeError("injected in forward")
        self.calls.append(
            dict(ids=input_ids.clone(), positions=positions.clone(), slots=out_cache_loc.clone(), metadata=metadata)
        )
        lanes = input_ids.shape[0]
        logits = torch.arange(self._vocab_size, dtype=torch.float32).repeat(lanes, 1)
        return logits, torch.full((lanes, self._hidden_size), float(len(self.calls)))


def spy_runner(
    world: DraftWorld, model: Any = None, sizes: object = (1, 2, 4, 8), **options: Any
) -> tuple[EagleDraftGraphRunner, SpyMetadata]:
    """A captured runner over a world's model, or another one, whose provider keeps what it sees."""
    spy = SpyMetadata(world.metadata)
    defaults = dict(
        num_steps=world.runner.num_steps,
        hidden_size=world.hidden_size,
        hidden_dtype=world.runner.hidden_dtype,
        buckets=BucketPolicy(sizes=sizes),
        device=world.table.table.device,
        executor=world.runner.executor,
    )
    runner = EagleDraftGraphRunner(world.model if model is None else model, spy, **(defaults | options))
    runner.capture()
    spy.seen.clear()
    if isinstance(model, SpyModel):
        model.calls.clear()
    return runner, spy
