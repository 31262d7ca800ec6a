"""Fixed input and output memory. Every load writes all lanes of the bucket: live ones, then padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_graph_runner.batch import DraftBatch, DraftInputs, DraftOutput

PAD_LENGTH = 1
"""Length of a padding lane. Everything else about it is 0: request, position, slots, token, probability, hidden."""

_MAX_PLANS = 4096
_POISON_INT = -(2**62) - 12345


@dataclass(frozen=True)
class _LoadPlan:
    """Where a batch of one size goes in one bucket. Sliced once: on the replay path slices add up."""

    live: tuple[tuple[str, torch.Tensor, torch.Tensor], ...]
    """Name of a field, its live lanes, and the same memory as words."""
    pad_to: tuple[torch.Tensor, ...]
    pad_from: tuple[torch.Tensor, ...]
    words: tuple[torch.Tensor, ...]
    """All live lanes as words."""
    lengths: torch.Tensor
    """Of the CPU mirror: all lanes, then live ones and padding."""
    lengths_live: torch.Tensor
    lengths_pad: torch.Tensor


class StaticBuffers:
    """Inputs and outputs for the largest bucket; smaller buckets use the front of the same memory.

    They are plain tensors even when made in inference mode, so that they can be written in and out of it.

    Args:
        max_batch_size: of the largest bucket.
        num_steps: draft steps.
        hidden_size, hidden_dtype: of the hidden states.
        device: where everything but the CPU mirror of the lengths lies.
    """

    @torch.inference_mode(False)
    def __init__(
        self, max_batch_size: int, num_steps: int, hidden_size: int, hidden_dtype: torch.dtype, device: torch.device
    ) -> None:
        self._max_batch_size, self._num_steps = max_batch_size, num_steps

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._fields = {
            "req_pool_indices": ints(max_batch_size),
            "seq_lens": ints(max_batch_size).fill_(PAD_LENGTH),
            "positions": ints(max_batch_size),
            "out_cache_loc": ints(max_batch_size * num_steps),
            "topk_index": ints(max_batch_size, 1),
            "topk_p": torch.zeros(max_batch_size, 1, device=device),
            "hidden_states": torch.zeros(max_batch_size, hidden_size, dtype=hidden_dtype, device=device),
        }
        # Copies of one dtype are one launch; as 32-bit words, floats and integers are of one dtype.
        self._words = {name: _as_words(field) for name, field in self._fields.items()}
        self._lanes = {name: field.shape[0] // max_batch_size for name, field in self._fields.items()}
        self._pads = {name: torch.zeros_like(words) for name, words in self._words.items()}
        self._pads["seq_lens"] = torch.full_like(self._fields["seq_lens"], PAD_LENGTH).view(torch.int32)
        self._seq_lens_cpu = torch.full((max_batch_size,), PAD_LENGTH, dtype=torch.int64)
        self.draft_tokens = ints(max_batch_size, num_steps)
        self.scores = torch.zeros(max_batch_size, num_steps, device=device)
        self._parents = (torch.arange(num_steps, device=device) - 1).repeat(max_batch_size, 1)
        self._plans: dict[tuple[int, int], _LoadPlan] = {}
        self._outputs: dict[int, DraftOutput] = {}

    def inputs(self, batch_size: int) -> DraftInputs:
        """The front of the buffers as the inputs of a bucket."""
        fields = {name: field[: batch_size * self._lanes[name]] for name, field in self._fields.items()}
        return DraftInputs(
            batch_size=batch_size,
            num_steps=self._num_steps,
            topk=1,
            seq_lens_cpu=self._seq_lens_cpu[:batch_size],
            **fields,
        )

    def load(self, inputs: DraftInputs, batch: DraftBatch) -> None:
        """Copies the live lanes of `batch` into `inputs` and resets all others. Enqueues copies only; nothing waits.

        One grouped copy, a single launch, for all inputs that are contiguous and of our dtypes, hidden states and pad
        values included; one more for each dtype of the others.
        """
        plan = self._plan(inputs.batch_size, batch.batch_size)
        sources = list(plan.pad_from)
        for name, typed, words in plan.live:
            value = getattr(batch, name)
            if value.dtype is not typed.dtype or not value.is_contiguous():
                _load_by_dtype(plan, batch)
                break
            sources.append(value.view(words.dtype))
        else:
            if sources:
                torch._foreach_copy_([*plan.pad_to, *plan.words], sources)
        if batch.seq_lens_cpu is None:
            inputs.seq_lens_cpu = None
        else:
            plan.lengths_live.copy_(batch.seq_lens_cpu)
            plan.lengths_pad.fill_(PAD_LENGTH)
            inputs.seq_lens_cpu = plan.lengths

    def output(self, batch_size: int) -> DraftOutput:
        """Views of the first `batch_size` lanes of what the last run left."""
        output = self._outputs.get(batch_size)
        if output is None:
            lanes = (values[:batch_size] for values in (self.draft_tokens, self._parents, self.scores))
            output = self._outputs[batch_size] = DraftOutput(*lanes)
        return output

    def poison(self) -> None:
        """Fills every input and output with values that no batch has, so that a lane that nothing resets shows."""
        for field in (*self._fields.values(), self.draft_tokens):
            field.fill_(_POISON_INT if field.dtype == torch.int64 else float("nan"))
        self.scores.fill_(float("nan"))
        self._seq_lens_cpu.fill_(_POISON_INT)

    def _plan(self, bucket: int, raw: int) -> _LoadPlan:
        plan = self._plans.get((bucket, raw))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[bucket, raw] = self._make_plan(bucket, raw)
        return plan

    def _make_plan(self, bucket: int, raw: int) -> _LoadPlan:
        live, pad_to, pad_from = [], [], []
        for name, words in self._words.items():
            lanes, per_request = self._lanes[name], len(words) // self._max_batch_size
            if raw:
                live.append((name, self._fields[name][: raw * lanes], words[: raw * per_request]))
            if raw < bucket:
                pad_to.append(words[raw * per_request : bucket * per_request])
                pad_from.append(self._pads[name][raw * per_request : bucket * per_request])
        return _LoadPlan(
            live=tuple(live),
            pad_to=tuple(pad_to),
            pad_from=tuple(pad_from),
            words=tuple(words for _, _, words in live),
            lengths=self._seq_lens_cpu[:bucket],
            lengths_live=self._seq_lens_cpu[:raw],
            lengths_pad=self._seq_lens_cpu[raw:bucket],
        )


def _as_words(field: torch.Tensor) -> torch.Tensor:
    """The same memory as 32-bit words; as it is where a row is not a whole number of them."""
    row = field.itemsize * (field.shape[1] if field.ndim > 1 else 1)
    return field if row % 4 else field.view(torch.int32)


def _load_by_dtype(plan: _LoadPlan, batch: DraftBatch) -> None:
    """One grouped copy for each pair of dtypes, which converts, and takes tensors of any strides."""
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    pairs = [(to, getattr(batch, name)) for name, to, _ in plan.live]
    for to, of in (*zip(plan.pad_to, plan.pad_from, strict=True), *pairs):
        group = groups.setdefault((to.dtype, of.dtype), ([], []))
        group[0].append(to)
        group[1].append(of)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources)


def exact_inputs(batch: DraftBatch, batch_size: int, num_steps: int) -> DraftInputs:
    """The inputs of a batch that no bucket serves, padded to `batch_size` in new memory.

    Nothing in it aliases the batch, so that a model that writes to its inputs leaves the caller's alone.
    """
    buffers = StaticBuffers(
        max(batch_size, 1), num_steps, batch.hidden_states.shape[1], batch.hidden_states.dtype, batch.seq_lens.device
    )
    inputs = buffers.inputs(batch_size)
    buffers.load(inputs, batch)
    return inputs
