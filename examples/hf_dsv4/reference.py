"""What Hugging Face generates itself, one sequence at a time, and whether an engine's tokens are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DeepseekV4ForCausalLM

CLOSE = 1e-4
"""Gap between the two best logits below which rounding may choose either."""


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of a prompt.

    Attributes:
        prompt: its tokens.
        tokens: those that follow.
        gaps: for each of these, by how much its logit is above the next best.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    gaps: Sequence[float]


@dataclass(frozen=True)
class Difference:
    """Where an engine's tokens leave the reference.

    Attributes:
        index: of the first token that differs.
        expected, got: the reference's token, and the engine's.
        gap: the reference's gap there.
    """

    index: int
    expected: int
    got: int
    gap: float

    @property
    def is_close(self) -> bool:
        """Whether rounding explains it."""
        return self.gap < CLOSE


def generate_with_hugging_face(hf: DeepseekV4ForCausalLM, prompt: Sequence[int], max_new_tokens: int) -> Reference:
    """Greedy generation by transformers, with its own attention and its own cache, of this sequence alone."""
    ids = torch.tensor([prompt], device=hf.device)
    made = hf.generate(
        ids, max_new_tokens=max_new_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    best = torch.cat(made.logits).topk(2).values
    return Reference(prompt, made.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


def compare(
    reference: Reference, output: Sequence[int], generate: Callable[[Sequence[int], int], Sequence[int]]
) -> Iterator[Difference]:
    """Where `output` differs from the reference: up to the first difference that rounding does not explain.

    From a close difference on, the engine goes on with the reference's token, and is compared again.

    Args:
        reference: what is expected.
        output: the engine's tokens.
        generate: gives the engine's tokens for a prompt and a number of them.
    """
    start, total = 0, len(reference.tokens)
    while True:
        expected = reference.tokens[start:]
        if len(output) != len(expected):
            raise ValueError(f"output: expected {len(expected)} tokens, got {len(output)}")
        index = next((i for i, pair in enumerate(zip(expected, output, strict=True)) if pair[0] != pair[1]), None)
        if index is None:
            return
        where = start + index
        found = Difference(where, expected[index], output[index], reference.gaps[where])
        yield found
        start = where + 1
        if not found.is_close or start == total:
            return
        output = generate([*reference.prompt, *reference.tokens[:start]], total - start)
