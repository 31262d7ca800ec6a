"""The draft chain: sample a token, run a forward on it, sample the next. The same code runs in graphs and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dsv4_graph_runner.batch import DraftInputs, split_draft_out_cache_loc
from dsv4_graph_runner.protocols import DraftModel


def run_draft_chain(
    model: DraftModel,
    inputs: DraftInputs,
    steps: Sequence[Any],
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts `inputs.num_steps` tokens for every lane, padding lanes included.

    Token 0 is the batch's own. Forward i (of num_steps - 1) takes token i at position seq_lens + i, writes its slot of
    step i, and gives token i + 1: the likeliest one. A score is the product of the probabilities so far.

    Args:
        model: the draft model.
        inputs: the padded batch; not written.
        steps: metadata of each forward, num_steps - 1 objects.
        out: tokens int64 [B, num_steps] and scores float32 [B, num_steps] to write into; None allocates.

    Returns:
        Tokens and scores.

    Raises:
        ValueError: the number of steps, or the shape of what the model returns, is wrong.
    """
    forwards = inputs.num_steps - 1
    if len(steps) != forwards:
        raise ValueError(f"metadata: expected {forwards} objects, one a step that runs a forward, got {len(steps)}")
    tokens, scores = [inputs.topk_index[:, 0]], [inputs.topk_p[:, 0]]
    hidden = inputs.hidden_states
    if forwards:
        slots = split_draft_out_cache_loc(inputs.out_cache_loc, inputs.batch_size, inputs.topk, inputs.num_steps)
    for i in range(forwards):
        positions = inputs.positions + i
        logits, hidden = model.forward(tokens[i], hidden, positions, slots[i], steps[i])
        _check_returned(inputs, logits, hidden)
        token = logits.argmax(dim=-1)
        probability = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, token[:, None])[:, 0]
        tokens.append(token)
        scores.append(scores[i] * probability)
    all_tokens, all_scores = (None, None) if out is None else out
    return torch.stack(tokens, dim=1, out=all_tokens), torch.stack(scores, dim=1, out=all_scores)


def _check_returned(inputs: DraftInputs, logits: torch.Tensor, hidden: torch.Tensor) -> None:
    lanes = inputs.batch_size * inputs.topk
    if logits.ndim != 2 or logits.shape[0] != lanes:
        raise ValueError(f"draft_model: expected logits [{lanes}, vocab], got {list(logits.shape)}")
    expected = [lanes, inputs.hidden_states.shape[1]]
    if list(hidden.shape) != expected:
        raise ValueError(f"draft_model: expected hidden states {expected}, got {list(hidden.shape)}")
