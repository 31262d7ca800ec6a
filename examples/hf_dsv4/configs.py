"""Configurations with random weights: one for tests on a CPU, one with the head dimensions of DeepSeek-V4-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4_backend import CacheGeometry

YARN = {"rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}


@dataclass(frozen=True)
class ExampleConfig:
    """A model to make up, and sizes that suit it.

    Args:
        sizes: keys of `DeepseekV4Config`, layer schedule included.
        page_size, swa_page_size: of the cache, see `CacheGeometry`.
        prompts: shortest and longest prompt of `dsv4 generate`, in tokens.
        draft_layers: first layers of the model that have a sliding window only: what a draft can be made of.
        late_scale: what the outputs of the other layers are scaled by, so that a draft of the first layers is often
            right.
    """

    sizes: Mapping[str, Any]
    page_size: int
    swa_page_size: int
    prompts: tuple[int, int]
    draft_layers: int
    late_scale: float

    def geometry(self, num_draft_tokens: int = 0) -> CacheGeometry:
        """Of a cache with rings for verify steps of `num_draft_tokens` rows a request; 0: no speculation."""
        rings = CacheGeometry.for_drafts(num_draft_tokens)
        return CacheGeometry(
            page_size=self.page_size,
            swa_page_size=self.swa_page_size,
            window=self.sizes["sliding_window"],
            c4_ring=rings.c4_ring,
            c128_ring=rings.c128_ring,
        )

    def hf_config(self) -> DeepseekV4Config:
        original = self.sizes["max_position_embeddings"] // 16
        options: dict[str, Any] = {
            "num_key_value_heads": 1,
            "rope_parameters": {**YARN, "original_max_position_embeddings": original},
            "bos_token_id": None,
            "eos_token_id": None,
            "attn_implementation": "eager",
            # Routing stays on the device; the other ways of running experts wait for it.
            "experts_implementation": "batched_mm",
        }
        return DeepseekV4Config(**self.sizes, **options)

    def build(self, seed: int = 0, device: torch.device | str = "cpu") -> DeepseekV4ForCausalLM:
        """The model in float32, with random weights, the same for a seed wherever it is built.

        Every layer changes the logits, unlike with transformers' own initial weights, whose attention is all but
        silent: an error anywhere would go unnoticed in the tokens.
        """
        model = DeepseekV4ForCausalLM(self.hf_config()).float().eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.copy_(self._weight(name, parameter, generator))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(_experts_of_tokens(buffer, self.sizes["n_routed_experts"], generator))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        return model.to(device)

    def _weight(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        value = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:  # larger keys, so that attention tells tokens apart
            return (1 + 0.2 * value) * (2.0 if "kv_norm" in name else 1.0)
        if parameter.ndim == 1:  # sinks, and biases and scales of hyper-connections
            return value * 0.5 + name.endswith("scale")
        if name.endswith("position_bias") or "embed" in name:
            return value
        value *= parameter.shape[-1] ** -0.5
        is_late = name.startswith("model.layers.") and int(name.split(".")[2]) >= self.draft_layers
        return value * self.late_scale if is_late and ("o_b_proj" in name or "down_proj" in name) else value


def _experts_of_tokens(table: torch.Tensor, experts: int, generator: torch.Generator) -> torch.Tensor:
    """Different experts for each token."""
    return torch.rand((len(table), experts), generator=generator).argsort(dim=1)[:, : table.shape[1]]


CONFIGS = {
    "tiny": ExampleConfig(
        sizes=dict(
            vocab_size=256,
            hidden_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=5,
            compress_ratios=[0, 0, 4, 128, 4],
            num_attention_heads=4,
            head_dim=128,
            qk_rope_head_dim=64,
            q_lora_rank=32,
            o_groups=2,
            o_lora_rank=32,
            sliding_window=32,
            index_n_heads=16,
            index_head_dim=64,
            index_topk=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            num_hash_layers=1,
            hc_mult=2,
            hc_sinkhorn_iters=4,
            max_position_embeddings=2048,
        ),
        page_size=128,
        swa_page_size=32,
        prompts=(1, 300),
        draft_layers=2,
        late_scale=0.3,
    ),
    "flash-dims": ExampleConfig(
        sizes=dict(
            vocab_size=4096,
            hidden_size=1024,
            moe_intermediate_size=128,
            num_hidden_layers=6,
            compress_ratios=[0, 0, 4, 128, 4, 128],
            num_attention_heads=64,
            head_dim=512,
            qk_rope_head_dim=64,
            q_lora_rank=256,
            o_groups=8,
            o_lora_rank=128,
            sliding_window=128,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=512,
            n_routed_experts=8,
            num_experts_per_tok=2,
            num_hash_layers=1,
            max_position_embeddings=8192,
        ),
        page_size=256,
        swa_page_size=256,
        prompts=(1, 2500),
        draft_layers=2,
        late_scale=0.3,
    ),
}
"""By the names that `dsv4 generate --config` takes."""
