"""Drafts for an engine: a chain for each request, in the graph runner, over the cache that the target has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dsv4_backend import DSV4DraftBackend
from dsv4_backend.transfer import send
from dsv4_examples.hf_dsv4.draft import FirstLayersDraft
from dsv4_examples.hf_dsv4.engine import Engine
from dsv4_examples.hf_dsv4.scheduler import Step
from dsv4_graph_runner import BucketPolicy, DraftBatch, EagleDraftGraphRunner
from dsv4_graph_runner.protocols import DraftModel, MetadataProvider


class Speculator:
    """Drafts for the requests of a verify step.

    A request has L tokens in the cache and one more, the target's last, which is not there yet: its verify step begins
    with it. The runner's chain takes it for token 0, of probability 1, so `num_drafts` drafts are a chain of
    `num_drafts + 1` tokens and `num_drafts` forwards; its slots are those of the verify step.

    Args:
        draft: the draft model.
        metadata: builds its metadata; a `DSV4DraftBackend`.
        num_drafts: S, drafts of a request in a step, at least 1.
        hidden_size, hidden_dtype: of the hidden states that the draft returns.
        max_requests: most requests of a step.
        device: where everything runs.
        executor: "cuda_graph", "eager" or "auto", as for `EagleDraftGraphRunner`.

    Raises:
        ValueError: an argument is not as above.
    """

    def __init__(
        self,
        draft: DraftModel,
        metadata: MetadataProvider,
        *,
        num_drafts: int,
        hidden_size: int,
        hidden_dtype: torch.dtype,
        max_requests: int,
        device: torch.device | str,
        executor: str = "auto",
    ) -> None:
        if type(num_drafts) is not int or num_drafts < 1:
            raise ValueError(f"num_drafts: expected an int of at least 1, got {num_drafts!r}")
        self.num_drafts, self.device = num_drafts, torch.device(device)
        self.runner = EagleDraftGraphRunner(
            draft,
            metadata,
            num_steps=num_drafts + 1,
            hidden_size=hidden_size,
            hidden_dtype=hidden_dtype,
            buckets=BucketPolicy(max_requests),
            device=device,
            executor=executor,
            # On a CPU the builder reads values, to check them, which the guard would refuse.
            guard="capture" if self.device.type == "cuda" else "off",
        )
        self._certain = torch.ones((max_requests, 1), device=device)
        # Of the target's hidden states, which a draft that begins with the embedding does not read.
        self._no_hidden = torch.zeros((max_requests, hidden_size), dtype=hidden_dtype, device=device)

    @classmethod
    def of_first_layers(
        cls, engine: Engine, num_layers: int, *, draft_window: str = "growing", executor: str = "auto"
    ) -> Speculator:
        """What an engine with `num_drafts` above 0 speculates with: the first layers of its model.

        Args:
            engine: the engine; not changed. Its `speculation` is to be set to what this returns.
            num_layers: layers of the model that make the draft, all of ratio 0.
            draft_window: "growing" or "frozen"; see `DSV4DraftBackend`.
            executor: of the runner.

        Raises:
            ValueError: as `Speculator`, `FirstLayersDraft` and `DSV4DraftBackend`.
        """
        target = engine.backend
        requests = target.tables.num_requests - 1
        backend = DSV4DraftBackend(
            target.cfg,
            target.geom,
            target.cache,
            target.tables,
            impl=engine.model.impl,
            max_rows=requests,
            draft_window=draft_window,
        )
        return cls(
            FirstLayersDraft(engine.model, backend, num_layers),
            backend,
            num_drafts=engine.num_drafts,
            hidden_size=engine.model.cfg.hidden_size,
            hidden_dtype=engine.model.hf.dtype,
            max_requests=requests,
            device=engine.device,
            executor=executor,
        )

    def capture(self, progress: Callable[[int, int, str], None] | None = None) -> Any:
        """Captures the draft loop of all batch sizes; see `EagleDraftGraphRunner.capture`."""
        return self.runner.capture(progress)

    def propose(self, step: Step) -> torch.Tensor:
        """Drafts for a verify step, whose slots the request tables on the device must have by now.

        Args:
            step: a step of mode TARGET_VERIFY. Where a request verifies fewer than S drafts, the others are made all
                the same, in the reserved slot, and are worth nothing.

        Returns:
            int64 [B, S] on the device; memory of the runner, valid until the next call. Nothing waits for the device.
        """
        width = self.num_drafts + 1
        rows = np.asarray(step.rows)
        slots = np.zeros((len(rows), width), np.int64)
        slots[np.arange(width) < rows[:, None]] = step.slots
        req_pool_indices, seq_lens, last, out_cache_loc = self._to_device(
            np.array([request.row for request in step.requests]),
            np.asarray(step.before),
            np.array([request.tokens[-1] for request in step.requests]),
            slots.ravel(),
        )
        batch = DraftBatch(
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            positions=seq_lens,
            out_cache_loc=out_cache_loc,
            topk_p=self._certain[: len(rows)],
            topk_index=last[:, None],
            hidden_states=self._no_hidden[: len(rows)],
        )
        return self.runner.replay(batch).draft_tokens[:, 1:]

    def _to_device(self, *parts: np.ndarray) -> tuple[torch.Tensor, ...]:
        """int64, in one copy that the host does not wait for."""
        packed = send(torch.from_numpy(np.concatenate(parts).astype(np.int64)), self.device)
        return packed.split([len(part) for part in parts])
