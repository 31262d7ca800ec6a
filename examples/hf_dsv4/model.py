"""A transformers model with its attention replaced, over flat rows of tokens of many requests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn
from transformers import DeepseekV4ForCausalLM

from dsv4_backend import DSV4Attention, DSV4Config
from dsv4_backend.validation import expect_type

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""Attention of a step: the layer's index and its hidden states [T, hidden_size], to as many."""


class FlatModel:
    """What a decoder computes for a step whose T tokens belong to any requests, at any positions.

    Embedding, hyper-connections, experts, norms and head are those of transformers, with the weights that they have
    there; none of them looks at a row's neighbours. Only attention does: it is what the caller passes in, with `layers`
    to compute it.

    Args:
        hf: the model that embedding, norms and head belong to; not changed.
        blocks: its decoder layers, with `AttentionSlot` for attention.
        layers: attention of each of the blocks.
        cfg: the model, as far as attention goes; with as many layers.
        impl: implementation of attention.

    `from_hf` makes one.
    """

    def __init__(
        self,
        hf: DeepseekV4ForCausalLM,
        blocks: Iterable[nn.Module],
        layers: Iterable[DSV4Attention],
        cfg: DSV4Config,
        impl: str,
    ) -> None:
        self.hf, self.blocks, self.layers, self.cfg, self.impl = hf, tuple(blocks), tuple(layers), cfg, impl

    @classmethod
    def from_hf(cls, hf: DeepseekV4ForCausalLM, *, impl: str = "auto") -> FlatModel:
        """The model with our attention, on the device and of the dtype that it has.

        Args:
            hf: the model. It is not changed and goes on to work; all weights but those of attention are shared with it.
            impl: implementation of attention: "auto", "triton" or "torch".

        Raises:
            ValueError: attention refuses the config, a weight, the dtype or `impl`.
        """
        expect_type("hf", hf, DeepseekV4ForCausalLM)
        cfg = DSV4Config.from_hf(hf.config)
        blocks, layers = [], []
        for index, (block, ratio) in enumerate(zip(hf.model.layers, cfg.compress_ratios, strict=True)):
            weights = block.self_attn.state_dict()
            layers.append(DSV4Attention.from_weights(weights, cfg, ratio, impl=impl, device=hf.device, dtype=hf.dtype))
            blocks.append(_with_attention(block, AttentionSlot(index)))
        return cls(hf, blocks, layers, cfg, impl)

    @property
    def device(self) -> torch.device:
        return self.hf.device

    def first_layers(self, count: int) -> FlatModel:
        """The first `count` decoder layers, with the same embedding and head: a draft, say.

        Raises:
            ValueError: there are not that many.
        """
        if not 1 <= count <= len(self.blocks):
            raise ValueError(f"count: expected 1 to {len(self.blocks)} layers, got {count!r}")
        cfg = replace(self.cfg, compress_ratios=self.cfg.compress_ratios[:count])
        return FlatModel(self.hf, self.blocks[:count], self.layers[:count], cfg, self.impl)

    @torch.no_grad()
    def hidden(self, ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Normed hidden states of the last layer, what the head reads.

        Args:
            ids: int64 [T]: tokens.
            attend: attention of the step. It knows the rows' positions.

        Returns:
            [T, hidden_size], of the model's dtype.
        """
        model = self.hf.model
        ids = ids[None]
        streams = model.embed_tokens(ids).unsqueeze(2).expand(-1, -1, self.hf.config.hc_mult, -1).contiguous()
        for block in self.blocks:
            streams = block(streams, input_ids=ids, attend=attend)
        return model.norm(model.hc_head(streams))[0]

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size]: of the token that follows each of the rows `hidden` [n, hidden_size]."""
        return self.hf.lm_head(hidden)


class AttentionSlot(nn.Module):
    """Stands where transformers has its attention, and hands on what it is given.

    Args:
        index: of the layer.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, None]:
        """[1, T, hidden_size] to the same; None stands for attention weights."""
        return attend(self.index, x[0])[None], None


def _with_attention(block: nn.Module, slot: AttentionSlot) -> nn.Module:
    """A decoder layer like `block`, and with its parameters, but with other attention."""
    changed = copy.copy(block)
    changed.__dict__["_modules"] = {**block._modules, "self_attn": slot}
    return changed
