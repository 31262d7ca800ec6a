"""What the runner asks of a draft model, and of whoever builds attention metadata. Any object that has it will do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from dsv4_graph_runner.batch import DraftInputs


@runtime_checkable
class DraftModel(Protocol):
    """A draft model: one forward of one draft step."""

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        metadata: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueues one step. It is recorded in a graph: no sync, no copy from the host, no state outside the cache.

        Args:
            input_ids: int64 [B*topk]. Token of each lane.
            hidden_states: [B*topk, H]. Of the target at step 0, afterwards what the previous step returned.
            positions: int64 [B*topk]. Position of the token.
            out_cache_loc: int64 [B*topk], contiguous. Cache slot that the lane writes; padding lanes have slot 0.
            metadata: what the provider made for this step.

        Returns:
            logits [B*topk, vocab] and hidden states [B*topk, H].
        """
        ...


@runtime_checkable
class MetadataProvider(Protocol):
    """Builds the attention metadata of all steps that run a forward: `num_steps - 1` of them.

    With `num_steps = 1` no forward runs, and none of these methods is called.
    """

    def bind_draft(self, inputs: DraftInputs) -> Sequence[Any]:
        """Called once for each bucket, before it is captured.

        Returns:
            `num_steps - 1` metadata objects, one a step. Their tensors keep their addresses as long as the graph lives.
        """
        ...

    def record_draft(self, inputs: DraftInputs) -> None:
        """Enqueues the build of all steps into what `bind_draft` returned for these inputs.

        Recorded in the graph, hence run again by every replay. Everything that depends on the batch is read from the
        tensors of `inputs` on the device: no sync, no copy from the host, and memory only from the graph's pool.
        """
        ...

    def prepare_draft(self, inputs: DraftInputs, raw_batch_size: int) -> None:
        """Host work before a replay, when `inputs` already hold the batch. It may do nothing.

        Args:
            inputs: as bound. `seq_lens_cpu` is valid during this call only, and must not be read asynchronously.
            raw_batch_size: live requests; the others are padding. 0 while capturing and on an idle rank.
        """
        ...

    def build_draft(self, inputs: DraftInputs) -> Sequence[Any]:
        """The metadata of a batch of any size that runs without a graph: `num_steps - 1` objects."""
        ...

    def draft_fingerprint(self) -> Hashable:
        """Identity of every address that a recorded build reads or writes and that `inputs` does not hold.

        Compared before a replay in the guard's "replay" mode: a graph keeps the addresses it was captured with.
        """
        ...


class StepBatch(Protocol):
    """A batch of a whole step of a model, as an engine has it."""

    @property
    def mode(self) -> Any:
        """What kind of step it is."""
        ...

    @property
    def batch_size(self) -> int:
        """Requests."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows of all requests."""
        ...

    @property
    def ragged(self) -> bool:
        """Whether each request has a number of rows of its own."""
        ...


class StepInputs(Protocol):
    """Fixed inputs of a bucket."""

    @property
    def ids(self) -> torch.Tensor:
        """int64 [rows]: tokens."""
        ...

    @property
    def meta(self) -> Any:
        """Metadata of the step."""
        ...


@runtime_checkable
class StepProvider(Protocol):
    """Keeps the inputs of whole steps at fixed addresses, and builds their attention metadata."""

    def prepare(self, batch: Any) -> Any:
        """The metadata of a step that runs without a graph."""
        ...

    def bind(self, mode: Any, batch_size: int, width: int) -> Any:
        """`StepInputs` for up to `batch_size` requests of `width` rows, full of padding; they never move."""
        ...

    def load(self, inputs: Any, batch: Any, ids: torch.Tensor) -> None:
        """Copies a batch and its tokens into bound inputs and resets what is behind it. Enqueues copies only.

        Raises ValueError, before anything is written, for a batch that does not fit the inputs.
        """
        ...

    def record(self, inputs: Any) -> None:
        """Enqueues the build of `inputs.meta` from what `inputs` holds, for a graph to record."""
        ...
