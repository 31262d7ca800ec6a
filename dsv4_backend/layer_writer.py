"""All that a step stores in one layer's cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_backend.cache import LayerCache
from dsv4_backend.compressor import compress, store_window
from dsv4_backend.layouts import EntryPool
from dsv4_backend.metadata import AttnMetadata


@dataclass(frozen=True, eq=False)
class CompressorWeights:
    """What compression needs beside the projections.

    Args:
        bias: float32 [4, 2 d] for ratio 4, [128, d] for ratio 128: position bias by token of a group.
        norm: float32 [d].
    """

    bias: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True, eq=False)
class LayerWriter:
    """Stores the window entries, compressed entries, indexer keys and state of a layer.

    Args:
        cache: the layer's cache.
        kv_norm: float32 [head_dim]: norm of window entries.
        rope: float32 [positions, rope_dim]: the layer's table, for everything that it stores.
        compressor: None for a layer of ratio 0.
        indexer: None but for ratio 4.
        eps: of every norm.
        impl: "auto", "triton" or "torch".
    """

    cache: LayerCache
    kv_norm: torch.Tensor
    rope: torch.Tensor
    compressor: CompressorWeights | None = None
    indexer: CompressorWeights | None = None
    eps: float = 1e-6
    impl: str = "auto"

    def write(
        self,
        meta: AttnMetadata,
        kv: torch.Tensor,
        kv_score: torch.Tensor | None = None,
        index_score: torch.Tensor | None = None,
    ) -> None:
        """Stores a step.

        Args:
            meta: the step's metadata, with plans of the layer's ratio.
            kv: [T, head_dim]: window entries before norm and rope.
            kv_score, index_score: float32 [T, width]: what the core compressor and the indexer's pool; None where the
                layer has none.

        Raises:
            ValueError: as `compressor.store_window` and `compressor.compress`; or rows are missing for this layer.
        """
        cache = self.cache
        for name, given, wanted in (
            ("kv_score", kv_score, cache.ratio > 0),
            ("index_score", index_score, cache.ratio == 4),
        ):
            if (given is not None) != wanted:
                what = "rows" if wanted else "none"
                raise ValueError(f"{name}: expected {what} in a layer of ratio {cache.ratio}, got the opposite")
        store_window(
            kv,
            meta.swa_out_cache_loc,
            meta.positions,
            cache.window,
            norm_weight=self.kv_norm,
            rope=self.rope,
            eps=self.eps,
            impl=self.impl,
        )
        if kv_score is not None:
            self._compress(kv_score, self.compressor, cache.compressed, cache.state, meta)
        if index_score is not None:
            self._compress(index_score, self.indexer, cache.index_keys, cache.index_state, meta)

    def _compress(
        self,
        score: torch.Tensor,
        weights: CompressorWeights | None,
        pool: EntryPool | None,
        state: torch.Tensor | None,
        meta: AttnMetadata,
    ) -> None:
        out_loc = meta.c4_out_loc if self.cache.ratio == 4 else meta.c128_out_loc
        if weights is None or pool is None or state is None:
            raise ValueError(f"compressor: expected weights for a layer of ratio {self.cache.ratio}, got none")
        if meta.plans is None or out_loc is None:
            raise ValueError(f"meta: expected plans of ratio {self.cache.ratio}, got none")
        compress(
            score,
            state,
            meta.plans,
            self.cache.ratio,
            pool,
            out_loc=out_loc,
            bias=weights.bias,
            norm_weight=weights.norm,
            rope=self.rope,
            eps=self.eps,
            impl=self.impl,
        )
