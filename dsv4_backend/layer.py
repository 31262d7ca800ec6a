"""One attention layer: projections, the cache's entries, selection, attention, output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from dsv4_backend.attention import sparse_attention
from dsv4_backend.cache import LayerCache
from dsv4_backend.config import DSV4Config
from dsv4_backend.dispatch import IMPLS
from dsv4_backend.indexer import IndexQuery, index_query, select_entries
from dsv4_backend.layer_products import float32_product, join, joint, norm_rope_heads, rms_norm, shared_rope_table
from dsv4_backend.layer_weights import collect_weights, layer_weights
from dsv4_backend.layer_writer import CompressorWeights, LayerWriter
from dsv4_backend.layouts import state_width
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.validation import expect_tensor, expect_type

DTYPES = (torch.float32, torch.bfloat16)
_JOINED = (
    ("wkv", "wq_a"),
    ("wq_b", "idx_wq_b"),
    ("comp_wkv", "comp_wgate", "idx_comp_wkv", "idx_comp_wgate", "idx_wproj"),
)
"""Projections of the same input, which lie one behind the other in memory: one matrix product each."""
AnyLayer = TypeVar("AnyLayer", bound="DSV4Attention")


class Projections(NamedTuple):
    """What a step's hidden states become; dtype is the layer's where nothing else is said.

    Attributes:
        latent: [T, q_lora_rank], normed: what the queries are made of.
        query: [T, num_heads, head_dim], normed and roped.
        kv: [T, head_dim]: window entries before norm and rope.
        kv_score, index_score: float32 [T, width]: what the core compressor and the indexer's pool; None where the
            layer has none.
        index_query: [T, index_heads, index_head_dim], not roped; None but for ratio 4.
        head_weights: float32 [T, index_heads], not scaled; None but for ratio 4.
    """

    latent: torch.Tensor
    query: torch.Tensor
    kv: torch.Tensor
    kv_score: torch.Tensor | None
    index_score: torch.Tensor | None
    index_query: torch.Tensor | None
    head_weights: torch.Tensor | None


class DSV4Attention(nn.Module):
    """An attention layer of DeepSeek-V4, for inference: no parameter takes a gradient.

    Args:
        cfg: the model. `max_position` is the length of the rope table, 256 bytes a position for each model and device.
        ratio: compression ratio of the layer: 0, 4 or 128.
        impl: "auto" (the kernels on a GPU, torch on a CPU), "triton" or "torch".
        device: where the weights lie.
        dtype: of the projections, of hidden states and of the output: torch.bfloat16 or torch.float32. Norms, position
            biases and the sink are float32. To change it, make another layer.

    Parameters have the plain names and shapes of `layer_weights`, and are random at first; `from_weights` knows other
    names, too. Rope tables are shared by the layers of a model and no part of the state dict.

    Raises:
        ValueError: an argument is not as above; or `q_lora_rank` is no multiple of 8, or `index_heads` none of 4
            (ratio 4): rows of joint products would not be aligned.

    Source: spec/attention_math.md, sections 3 to 6. docs/attention.md has the order of calls.
    """

    sink: nn.Parameter
    q_norm: nn.Parameter
    kv_norm: nn.Parameter
    wkv: nn.Parameter
    wo_a: nn.Parameter
    wo_b: nn.Parameter
    rope: torch.Tensor

    def __init__(
        self,
        cfg: DSV4Config,
        ratio: int,
        *,
        impl: str = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        expect_type("cfg", cfg, DSV4Config)
        if ratio not in (0, 4, 128):
            raise ValueError(f"ratio: expected 0, 4 or 128, got {ratio!r}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected torch.float32 or torch.bfloat16, got {dtype!r}")
        if impl not in IMPLS:
            raise ValueError(f"impl: expected one of {IMPLS}, got {impl!r}")
        if cfg.q_lora_rank % 8:
            raise ValueError(f"cfg.q_lora_rank: expected a multiple of 8, got {cfg.q_lora_rank}")
        if ratio == 4 and cfg.index_heads % 4:
            raise ValueError(f"cfg.index_heads: expected a multiple of 4, got {cfg.index_heads}")
        self.cfg, self.ratio, self.impl, self.dtype = cfg, ratio, impl, dtype
        for name, weight in layer_weights(cfg, ratio).items():
            value = torch.empty(weight.shape, dtype=torch.float32 if weight.float32 else dtype, device=device)
            if weight.float32:
                value.fill_(1.0 if name.endswith("norm") else 0.0)
            elif not value.is_meta:  # where torch would load its compiler
                value.normal_(std=weight.shape[1] ** -0.5)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self._settle()

    @classmethod
    def from_weights(
        cls: type[AnyLayer],
        weights: Mapping[str, torch.Tensor],
        cfg: DSV4Config,
        ratio: int,
        *,
        prefix: str = "",
        impl: str = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> AnyLayer:
        """A layer with these weights, copied to `device` and `dtype`.

        Args:
            weights, prefix: as for `layer_weights.collect_weights`: plain names, those of DeepSeek's and SGLang's
                checkpoints, or those of transformers. FP8 blocks with scales must be dequantised before.
            cfg, ratio, impl, device, dtype: as for `DSV4Attention`.

        Raises:
            ValueError: as `DSV4Attention` and `collect_weights`.
        """
        found = collect_weights(weights, cfg, ratio, prefix)
        layer = cls(cfg, ratio, impl=impl, device="meta", dtype=dtype).to_empty(device=device)
        layer.load_state_dict(found)
        return layer

    @torch.no_grad()
    def forward(self, x: torch.Tensor, meta: AttnMetadata, cache: LayerCache) -> torch.Tensor:
        """Stores a step in the cache, then attends.

        Everything of the step is stored first, then entries are selected, then queries attend: so a query sees its own
        token, and the entry that its token closes.

        Args:
            x: [T, hidden_size], of the layer's dtype: hidden states after the block's input norm, padding included.
            meta: the step's metadata, with plans of the layer's ratio. For ratio 4, `c4_sparse_page_indices` is
                written: until the next layer of ratio 4 it holds this one's selection.
            cache: the layer's cache, of any format.

        Returns:
            [T, hidden_size], of the layer's dtype. Rows of padding are finite where their `x` and the cache's reserved
            slot 0 are, and mean nothing; padding stores nothing that anybody reads.

        Nothing waits for the device; a CUDA graph can record it.

        Raises:
            ValueError: before anything is written: arguments do not go together, or cuBLAS may round float32 to TF32
                in a layer of dtype float32.
        """
        self._check(x, meta, cache)
        made = self.project(x, meta.positions)
        self.writer(cache).write(meta, made.kv, made.kv_score, made.index_score)
        self.select(made, meta, cache)
        return self.combine(self.attend(made.query, meta, cache))

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projections:
        """Everything that is made of the hidden states of rows at `positions`."""
        cfg = self.cfg
        of_hidden, of_latent, pooled = self._joined()
        kv, latent = (x @ joint(of_hidden).T).split((cfg.head_dim, cfg.q_lora_rank), dim=1)
        latent = rms_norm(latent, self.q_norm, cfg.rms_norm_eps)
        made = latent @ joint(of_latent).T
        query = made[:, : cfg.num_heads * cfg.head_dim].view(-1, cfg.num_heads, cfg.head_dim)
        query = norm_rope_heads(query, positions, self.rope, cfg.rms_norm_eps)
        if not self.ratio:
            return Projections(latent, query, kv, None, None, None, None)
        scores = float32_product(x, joint(pooled))
        width = state_width(self.ratio, cfg.head_dim)
        if self.ratio == 128:
            return Projections(latent, query, kv, scores, None, None, None)
        kv_score, index_score, head_weights = scores.split(
            (width, state_width(4, cfg.index_head_dim), cfg.index_heads), dim=1
        )
        index = made[:, cfg.num_heads * cfg.head_dim :].view(-1, cfg.index_heads, cfg.index_head_dim)
        return Projections(latent, query, kv, kv_score, index_score, index, head_weights)

    def writer(self, cache: LayerCache) -> LayerWriter:
        """What stores a step of this layer in `cache`."""
        return LayerWriter(
            cache,
            self.kv_norm,
            self.rope,
            compressor=self._compressor("comp") if self.ratio else None,
            indexer=self._compressor("idx_comp") if self.ratio == 4 else None,
            eps=self.cfg.rms_norm_eps,
            impl=self.impl,
        )

    def select(self, made: Projections, meta: AttnMetadata, cache: LayerCache) -> None:
        """Ratio 4: fills `meta.c4_sparse_page_indices` in; other ratios have nothing to select."""
        if self.ratio != 4:
            return
        assert cache.index_keys is not None
        assert meta.c4_lengths is not None
        assert meta.c4_sparse_page_indices is not None
        select_entries(
            self.index_query(made, meta.positions, cache),
            cache.index_keys,
            meta.page_table,
            meta.c4_lengths,
            out=meta.c4_sparse_page_indices,
            max_length=meta.max_c4_length,
            table_rows=meta.table_rows,
            impl=self.impl,
        )

    def index_query(self, made: Projections, positions: torch.Tensor, cache: LayerCache) -> IndexQuery:
        """The indexer's queries, as `cache` has its keys."""
        assert cache.index_keys is not None
        assert made.index_query is not None
        assert made.head_weights is not None
        return index_query(made.index_query, made.head_weights, positions, self.rope, cache.index_keys, impl=self.impl)

    def compressed_lists(
        self, meta: AttnMetadata
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Slots of the compressed entries that rows attend, how many they are, and which list is whose.

        As `sparse_attention` takes them; None for ratio 0, and for lists that each row has of its own.
        """
        if self.ratio == 4:
            return meta.c4_sparse_page_indices, meta.c4_sparse_lengths, None
        if self.ratio == 128:
            return meta.c128_page_indices, meta.c128_lengths, meta.table_rows
        return None, None, None

    def attend(self, query: torch.Tensor, meta: AttnMetadata, cache: LayerCache) -> torch.Tensor:
        """[T, num_heads, head_dim]: what each head reads, turned back by its position."""
        indices, lengths, rows = self.compressed_lists(meta)
        return sparse_attention(
            query,
            cache.window,
            meta.swa_page_indices,
            meta.swa_lengths,
            cache.compressed,
            indices,
            lengths,
            sink=self.sink,
            positions=meta.positions,
            rope=self.rope,
            compressed_rows=rows,
            impl=self.impl,
        )

    def combine(self, context: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size]: the output projection, group by group and then as a whole."""
        groups = self.cfg.o_groups
        weight = self.wo_a.view(groups, self.cfg.o_lora_rank, -1)
        heads = context.view(len(context), groups, weight.shape[2])
        parts = torch.bmm(heads.transpose(0, 1), weight.transpose(1, 2))  # [groups, T, o_lora_rank]
        return parts.transpose(0, 1).flatten(1) @ self.wo_b.T

    def extra_repr(self) -> str:
        return f"ratio={self.ratio}, impl={self.impl!r}, dtype={self.dtype}"

    def _compressor(self, name: str) -> CompressorWeights:
        return CompressorWeights(self.get_parameter(f"{name}_ape"), self.get_parameter(f"{name}_norm"))

    def _joined(self) -> list[list[nn.Parameter]]:
        """The projections of each row of `_JOINED` that the layer has."""
        return [[self.get_parameter(name) for name in names if name in self._parameters] for names in _JOINED]

    def _settle(self) -> None:
        """Joins weights and finds the rope table, once the weights have come to lie where they are."""
        if self.wkv.is_meta:
            self.rope = torch.empty((self.cfg.max_position, self.cfg.rope_dim), device="meta")
            return
        for parts in filter(None, self._joined()):
            join(parts)
        self.rope = shared_rope_table(self.cfg, self.ratio, self.wkv.device)

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> DSV4Attention:
        super()._apply(fn, recurse)
        self._settle()
        return self

    def _check(self, x: torch.Tensor, meta: AttnMetadata, cache: LayerCache) -> None:
        expect_type("meta", meta, AttnMetadata)
        expect_type("cache", cache, LayerCache)
        expect_tensor("x", x, dtypes=(self.dtype,), ndim=2, device=self.wkv.device)
        if len(x) != meta.num_rows:
            raise ValueError(f"x: expected {meta.num_rows} rows, those of meta, got {len(x)}")
        if x.shape[1] != self.cfg.hidden_size:
            raise ValueError(f"x: expected {self.cfg.hidden_size} columns, got {x.shape[1]}")
        if cache.ratio != self.ratio:
            raise ValueError(f"cache: expected that of a layer of ratio {self.ratio}, got one of ratio {cache.ratio}")
        for name, pool, dim in (
            ("window", cache.window, self.cfg.head_dim),
            ("index_keys", cache.index_keys, self.cfg.index_head_dim),
        ):
            if pool is not None and (pool.layout.head_dim, pool.layout.rope_dim) != (dim, self.cfg.rope_dim):
                raise ValueError(
                    f"cache.{name}: expected head_dim {dim} and rope_dim {self.cfg.rope_dim}, got "
                    f"{pool.layout.head_dim} and {pool.layout.rope_dim}"
                )
        lists = {0: meta.swa_page_indices, 4: meta.c4_sparse_page_indices, 128: meta.c128_page_indices}
        if lists[self.ratio] is None or (self.ratio and meta.plans is None):
            raise ValueError(f"meta: expected metadata with plans of ratio {self.ratio}, got some without")
        if self.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
            raise ValueError(
                "torch.backends.cuda.matmul: expected float32 products in full precision (fp32_precision 'ieee') for a "
                "layer of dtype float32, got TF32 allowed"
            )
