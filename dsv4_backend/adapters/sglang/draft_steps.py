"""SGLang's draft model and our metadata, as dsv4_graph_runner asks for them. Needs no SGLang itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_backend.adapters.sglang import batches


@dataclass(eq=False)
class DraftStep:
    """What one draft step runs with.

    Attributes:
        forward_batch: SGLang's ForwardBatch of the bucket, the same in all steps.
        backend: the attention backend of the step.
        metadata: its DSV4Metadata; replaced whenever the step is built.
    """

    forward_batch: Any
    backend: Any
    metadata: Any


class DraftModel:
    """One forward of SGLang's draft model.

    Args:
        model_runner: SGLang's; its `forward(forward_batch)` runs the model.
        attend_with: a context in which the model finds the attention backend that is given.
    """

    def __init__(self, model_runner: Any, attend_with: Callable[[Any, Any], AbstractContextManager[Any]]) -> None:
        self._model_runner, self._attend_with = model_runner, attend_with

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        metadata: DraftStep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `dsv4_graph_runner.DraftModel`."""
        batch = metadata.forward_batch
        batch.input_ids, batch.positions, batch.out_cache_loc = input_ids, positions, out_cache_loc
        batch.spec_info.hidden_states = hidden_states
        metadata.backend.forward_metadata = metadata.metadata
        with self._attend_with(metadata.backend, batch):
            output = self._model_runner.forward(batch).logits_output
        return output.next_token_logits, output.hidden_states


class DraftMetadata:
    """The metadata of SGLang's draft steps, as `dsv4_graph_runner.MetadataProvider`.

    Args:
        multi_step: our backend of the draft steps.
        new_batch: a ForwardBatch for the inputs of a bucket.
    """

    def __init__(self, multi_step: Any, new_batch: Callable[[Any], Any]) -> None:
        self._multi_step, self._new_batch = multi_step, new_batch
        self._bound: dict[int, list[DraftStep]] = {}

    def bind_draft(self, inputs: Any) -> list[DraftStep]:
        self._multi_step.dsv4_source.follow_tables(in_capture=True)
        steps = self._bound[inputs.batch_size] = self._steps(inputs, self._build(inputs))
        return steps

    def record_draft(self, inputs: Any) -> None:
        # New objects around the same tensors: what SGLang's kernels keep in them belongs to one recording.
        for step, metadata in zip(self._bound[inputs.batch_size], self._build(inputs), strict=True):
            step.metadata = metadata

    def prepare_draft(self, inputs: Any, raw_batch_size: int) -> None:
        """All of it is recorded: only that its tables are still there is checked."""
        self._multi_step.dsv4_source.follow_tables(in_capture=False)

    def build_draft(self, inputs: Any) -> list[DraftStep]:
        source = self._multi_step.dsv4_source
        with source.building_eagerly():
            return self._steps(inputs, self._build(inputs))

    def draft_fingerprint(self) -> Hashable:
        return self._multi_step.dsv4_source.builder.draft_fingerprint()

    def _build(self, inputs: Any) -> list[Any]:
        batch = batches.draft_batch(
            inputs.req_pool_indices, inputs.seq_lens, inputs.out_cache_loc, inputs.num_steps, inputs.topk
        )
        return list(self._multi_step.dsv4_source.draft_steps(batch))

    def _steps(self, inputs: Any, metadata: list[Any]) -> list[DraftStep]:
        batch = self._new_batch(inputs)
        backends = self._multi_step.attn_backends[: len(metadata)]
        return [DraftStep(batch, *each) for each in zip(backends, metadata, strict=True)]
