"""Small models of transformers with random weights, what they generate, and engines that must do the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from dsv4_examples.hf_dsv4.configs import CONFIGS
from dsv4_examples.hf_dsv4.engine import Engine
from dsv4_examples.hf_dsv4.model import FlatModel
from dsv4_examples.hf_dsv4.reference import Reference, compare, generate_with_hugging_face
from dsv4_examples.hf_dsv4.scheduler import Request, Step

TINY = CONFIGS["tiny"]
SMALL = dataclasses.replace(
    TINY,
    sizes={**TINY.sizes, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "index_topk": 8},
    draft_layers=1,
)
"""A layer of each kind, for what runs many steps."""
MODELS = {"tiny": TINY, "small": SMALL, "flash-dims": CONFIGS["flash-dims"]}

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# Head dimensions of V4-Flash take a CPU minutes.
each_model = pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(name, device, marks=[pytest.mark.gpu] if device == "cuda" else [], id=f"{name}-{device}")
        for name, device in (("tiny", "cpu"), ("tiny", "cuda"), ("flash-dims", "cuda"))
    ],
)


class Case:
    """A model on a device; on a GPU attention runs in Triton, on a CPU in torch. `case` makes one and keeps it."""

    def __init__(self, name: str, device: str) -> None:
        self.config, self.device = MODELS[name], torch.device(device)
        self.hf = self.config.build(seed=1, device=device)
        self.model = FlatModel.from_hf(self.hf)
        self.vocabulary: int = self.config.sizes["vocab_size"]
        self._references: dict[tuple[int, ...], Reference] = {}

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return torch.randint(self.vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    def reference(self, prompt: Sequence[int], count: int) -> Reference:
        """What Hugging Face generates: the first `count` tokens."""
        found = self._references.get(tuple(prompt))
        if found is None or len(found.tokens) < count:
            found = self._references[tuple(prompt)] = generate_with_hugging_face(self.hf, prompt, count)
        return Reference(found.prompt, found.tokens[:count], found.gaps[:count])

    def engine(
        self, *, chunk_size: int = 4096, max_requests: int = 4, max_len: int = 400, drafts: int = 0, **options: Any
    ) -> Engine:
        """An engine whose steps after the prompts run in buckets, on a GPU in graphs."""
        engine = Engine(
            self.model,
            geom=self.config.geometry(1 + drafts if drafts else 0),
            max_requests=max_requests,
            max_len=max_len,
            chunk_size=chunk_size,
            num_drafts=drafts,
            **options,
        )
        engine.capture()
        return engine

    def check(self, engine: Engine, requests: Iterable[Request]) -> int:
        """Requests have Hugging Face's tokens; returns how many tokens rounding alone explains."""
        close = 0

        def again(prompt: Sequence[int], count: int) -> Sequence[int]:
            request = engine.add(prompt, count)
            engine.run()
            return request.output

        for request in requests:
            prompt = request.tokens[: request.prompt_length]
            assert len(request.output) == request.max_new_tokens
            for found in compare(self.reference(prompt, request.max_new_tokens), request.output, again):
                assert found.is_close, f"prompt of {len(prompt)} tokens: {found}"
                close += 1
        return close


@cache
def case(name: str, device: str = "cpu") -> Case:
    return Case(name, device)


class Guesses:
    """Drafts that are Hugging Face's tokens up to a random place, and wrong behind it."""

    def __init__(self, served: Case, drafts: int) -> None:
        self.served, self.drafts, self.rng = served, drafts, np.random.default_rng(drafts)

    def propose(self, step: Step) -> torch.Tensor:
        rows = []
        for request in step.requests:
            prompt = request.tokens[: request.prompt_length]
            known = list(self.served.reference(prompt, request.max_new_tokens).tokens[len(request.output) :])
            right = self.rng.integers(self.drafts + 1)
            row = (known + [0] * self.drafts)[: self.drafts]
            vocabulary = self.served.vocabulary
            rows.append([token if i < right else (token + 1) % vocabulary for i, token in enumerate(row)])
        return torch.tensor(rows, device=self.served.device)
