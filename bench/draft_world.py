"""A draft model with its cache, tables, metadata and runner. Two worlds made alike stay alike, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_bench.draft_models import HashDraft, TransformerDraft, WindowMetadata
from dsv4_bench.draft_pool import BatchMaker, RedZonePool, SlotTable
from dsv4_graph_runner import BucketPolicy, DraftOutput, EagleDraftGraphRunner
from dsv4_graph_runner.device import normal_device

MODELS = ("hash", "transformer")


@dataclass(frozen=True, eq=False)
class DraftWorld:
    """What a test, a bench or a capture test of the runner needs; `make` builds it.

    Attributes:
        model, pool, table, metadata: the draft side.
        runner: over them, not captured yet.
        hidden_size: of the hidden states, float32.
    """

    model: HashDraft | TransformerDraft
    pool: RedZonePool
    table: SlotTable
    metadata: WindowMetadata
    runner: EagleDraftGraphRunner
    hidden_size: int

    @classmethod
    def make(
        cls,
        model: str,
        device: torch.device | str,
        buckets: BucketPolicy,
        *,
        num_steps: int = 3,
        executor: str = "auto",
        pool: str = "shared",
        guard: str = "capture",
        num_requests: int | None = None,
        max_len: int = 2000,
        window: int = 16,
        hidden_size: int = 128,
        dtype: torch.dtype = torch.float32,
    ) -> DraftWorld:
        """A world whose contents depend on the arguments only.

        Args:
            model: "hash" (exact integer arithmetic) or "transformer".
            device, buckets, num_steps, executor, pool, guard: of the runner.
            num_requests: rows of the table; by default twice the largest bucket.
            max_len: positions a request.
            window: positions that a step looks back.
            hidden_size: of the model.
            dtype: of the transformer and of the hidden states.
        """
        device = normal_device(device)
        page, ring = 8, max(32, -(-(window + num_steps) // 8) * 8)
        table = SlotTable(num_requests or 2 * buckets.largest, max_len, window, page, ring, device)
        draft: HashDraft | TransformerDraft
        if model == "hash":
            cache = RedZonePool(table.num_slots, page, [1], torch.int64, device)
            draft = HashDraft(cache)
        elif model == "transformer":
            cache = RedZonePool(table.num_slots, page, [hidden_size] * 2, dtype, device)
            draft = TransformerDraft(cache, hidden_size=hidden_size, dtype=dtype)
        else:
            raise ValueError(f"model: expected one of {MODELS}, got {model!r}")
        metadata = WindowMetadata(table, buckets.largest, num_steps)
        runner = EagleDraftGraphRunner(
            draft,
            metadata,
            num_steps=num_steps,
            hidden_size=hidden_size,
            hidden_dtype=dtype,
            buckets=buckets,
            device=device,
            executor=executor,
            pool=pool,
            guard=guard,
        )
        return cls(draft, cache, table, metadata, runner, hidden_size)

    def batches(self, seed: int = 0) -> BatchMaker:
        """A source of batches for this world; equal seeds give equal batches."""
        return BatchMaker(
            self.table, self.runner.num_steps, self.model.vocab_size, self.hidden_size, self.runner.hidden_dtype, seed
        )


def output_difference(got: DraftOutput, expected: DraftOutput) -> str | None:
    """The first lane and step in which two outputs differ by a bit, or None."""
    for name in ("draft_tokens", "parents", "scores"):
        a, b = getattr(got, name), getattr(expected, name)
        if a.shape != b.shape:
            return f"{name}: expected shape {list(b.shape)}, got {list(a.shape)}"
        if not torch.equal(a, b):
            lane, step = (a != b).nonzero()[0].tolist()
            return f"{name}[{lane}, {step}]: expected {b[lane, step].item()}, got {a[lane, step].item()}"
    return None


def memory_difference(got: RedZonePool, expected: RedZonePool) -> str | None:
    """The first row, slot 0 aside, in which two pools differ, or None. Red zones are rows, too."""
    zero = int(got.row_of_slot[0])
    for i, (a, b) in enumerate(zip(got.tensors(), expected.tensors(), strict=True)):
        differs = (a != b).any(1)
        differs[zero] = False
        if bool(differs.any()):
            return f"cache tensor {i}: row {int(differs.nonzero()[0, 0])} differs"
    return None
