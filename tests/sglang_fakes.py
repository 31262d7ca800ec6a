"""Stand-ins for what the SGLang adapter is given, written from the description of its interface; SGLang is not needed.

The backend has SGLang's life cycle: what it stores out of a graph, and what a graph then completes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from dsv4_backend import RequestTables
from dsv4_backend.adapters.sglang.backend import adopt
from dsv4_backend.adapters.sglang.objects import EngineTypes
from dsv4_backend.adapters.sglang.releases import RELEASES
from dsv4_backend.adapters.sglang.source import MetadataSource


class Mode(enum.Enum):
    EXTEND = 1
    DECODE = 2
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6

    def is_idle(self) -> bool:
        return self is Mode.IDLE


@dataclass
class Core:
    page_size: int
    page_table: torch.Tensor
    raw_out_loc: torch.Tensor
    cuda_int32_kwargs: dict[str, Any]
    seq_lens_casual: torch.Tensor
    positions_casual: torch.Tensor
    swa_page_indices: torch.Tensor
    swa_topk_lengths: torch.Tensor
    index_topk: int
    present_ratios: tuple[int, ...]
    swa_out_cache_loc: torch.Tensor | None = None
    c4_out_loc: torch.Tensor | None = None
    c4_topk_lengths_raw: torch.Tensor | None = None
    c4_topk_lengths_clamp1: torch.Tensor | None = None
    c4_sparse_topk_lengths: torch.Tensor | None = field(init=False)
    c4_sparse_page_indices: torch.Tensor | None = field(init=False)
    c4_sparse_raw_indices: torch.Tensor | None = field(init=False)
    c128_out_loc: torch.Tensor | None = None
    c128_page_indices: torch.Tensor | None = None
    c128_topk_lengths_clamp1: torch.Tensor | None = None
    c0_flashmla_metadata: Any = field(init=False)
    c4_flashmla_metadata: Any = field(init=False)
    c128_flashmla_metadata: Any = field(init=False)


@dataclass
class Metadata:
    core_attn_metadata: Core
    indexer_metadata: Any
    c4_compress_metadata: Any = None
    c128_compress_metadata: Any = None


class DecodePlan(NamedTuple):
    compress_ratio: int
    plan_d: torch.Tensor


class PrefillPlan(NamedTuple):
    compress_ratio: int
    plan_c: torch.Tensor
    plan_w: torch.Tensor
    pin_buffer: torch.Tensor | None = None


@dataclass
class EarlierCore(Core):
    """As 0.5.16 has it."""

    index_topk: int = field(init=False)
    present_ratios: tuple[int, ...] = field(init=False)
    c0_flashmla_metadata: Any = field(init=False)
    c4_sparse_topk: int = 0
    c1_flashmla_metadata: Any = field(init=False)


TYPES = EngineTypes(Core, Metadata, DecodePlan, PrefillPlan, object, RELEASES["0.5.23"])
EARLIER_TYPES = EngineTypes(EarlierCore, Metadata, DecodePlan, PrefillPlan, object, RELEASES["0.5.16"])


class Backend:
    """The parts of SGLang's backend that the adapter stands in front of or reads."""

    def __init__(
        self,
        tables: RequestTables,
        *,
        ratios: tuple[int, ...] = (4, 128),
        rings: dict[int, int] | None = None,
        drafts: int = 0,
        steps: int = 0,
        index_topk: int = 512,
    ) -> None:
        self.model_runner = SimpleNamespace(spec_algorithm=SimpleNamespace(is_dspark=lambda: False))
        self.token_to_kv_pool = SimpleNamespace(
            full_to_swa_index_mapping=tables.full_to_swa,
            layer_mapping=[(ratio, 0, None) for ratio in (0, *ratios)],
            get_ring_size=(rings or {4: 16 if drafts else 8, 128: 256 if drafts else 128}).__getitem__,
            swa_page_size=256,
        )
        self.req_to_token, self.page_size, self.index_topk = tables.req_to_token, 256, index_topk
        self.hisparse_coordinator = None
        self.mtp_enabled, self.speculative_num_draft_tokens, self.speculative_num_steps = drafts > 0, drafts, steps
        self.topk = 1
        self.forward_metadata: Any = None
        self._raw: dict[Any, Any] = {}

    def init_forward_metadata_indexer(self, core: Core, *, use_prefill_cuda_graph: bool = False) -> Any:
        return SimpleNamespace(
            page_table=core.page_table,
            compressed_seq_lens=core.c4_topk_lengths_raw,
            max_compressed_seq_len=core.page_table.shape[1] * 64,
            use_prefill_cuda_graph=use_prefill_cuda_graph,
        )

    def init_forward_metadata(self, batch: Any) -> None:
        if batch.forward_mode.is_idle():
            return
        self.forward_metadata = self._build_forward_metadata(batch)
        self.init_forward_metadata_in_graph(batch)

    def _build_forward_metadata(self, batch: Any, use_prefill_cuda_graph: bool = False) -> Any:
        mode = batch.forward_mode
        if mode is Mode.EXTEND:
            return self.init_forward_metadata_prefill(
                max_seq_len=self.req_to_token.shape[1] if use_prefill_cuda_graph else max(batch.seq_lens_cpu.tolist()),
                req_pool_indices=batch.req_pool_indices,
                seq_lens=batch.seq_lens.int(),
                seq_lens_cpu=batch.seq_lens_cpu.tolist(),
                out_cache_loc=batch.out_cache_loc,
                num_tokens=sum(batch.extend_seq_lens_cpu),
                extend_seq_lens=batch.extend_seq_lens,
                extend_seq_lens_cpu=batch.extend_seq_lens_cpu,
                need_compress=True,
                use_prefill_cuda_graph=use_prefill_cuda_graph,
            )
        if mode is Mode.DRAFT_EXTEND_V2:
            size, width = batch.batch_size, self.speculative_num_draft_tokens
            return self.init_forward_metadata_draft_extend(
                req_pool_indices=batch.req_pool_indices[:size],
                seq_lens=batch.seq_lens[:size],
                num_tokens_per_req=width,
                out_cache_loc=batch.out_cache_loc,
            )
        return self._inputs(batch)

    def _inputs(self, batch: Any) -> Any:
        size, loc = batch.batch_size, batch.out_cache_loc
        lens = getattr(batch.spec_info, "verify_lens", None)
        width = self.speculative_num_draft_tokens if batch.forward_mode is Mode.TARGET_VERIFY else 1
        rows = size * width if lens is None else batch.spec_info.graph_num_tokens
        idle = getattr(batch, "actual_forward_mode", None) is Mode.IDLE  # a rank without requests in a graph
        loc = loc[:0] if idle else loc
        raw = SimpleNamespace(
            req_pool_indices=torch.zeros_like(batch.req_pool_indices) if idle else batch.req_pool_indices.clone(),
            seq_lens=torch.ones_like(batch.seq_lens) if idle else batch.seq_lens.clone(),
            out_cache_loc=torch.nn.functional.pad(loc, (0, rows - len(loc))),
        )
        if batch.forward_mode is Mode.TARGET_VERIFY:
            raw.extend_seq_lens = torch.full((size,), width, dtype=torch.int32)
            raw.verify_lens = lens
            if lens is not None:  # rows that nobody needs: to the padding requests, or to the last one
                raw.verify_lens = torch.nn.functional.pad(lens, (0, size - len(lens))).int()
                raw.verify_lens[len(lens) if size > len(lens) else -1] += rows - int(lens.sum())
        return raw

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        made = self._build_forward_metadata(batch)
        key = batch.forward_mode, batch.batch_size
        stored = self._raw.setdefault(key, made)
        if stored is not made and not hasattr(made, "core_attn_metadata"):
            for name, value in vars(made).items():
                if isinstance(value, torch.Tensor):
                    getattr(stored, name).copy_(value)
        self.forward_metadata = stored

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        raise AssertionError("SGLang's own build: the adapter should have completed the metadata")

    def on_after_cuda_graph_warmup(self) -> None:
        pass

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, batch: Any) -> Any:
        self.forward_metadata = self._build_forward_metadata(batch, use_prefill_cuda_graph=True)
        return self.forward_metadata

    def init_forward_metadata_prefill(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("SGLang's own build")

    init_forward_metadata_draft_extend = init_forward_metadata_prefill


class MultiStep(Backend):
    """The backend of the draft steps: a child for each."""

    def __init__(self, tables: RequestTables, **options: Any) -> None:
        super().__init__(tables, **options)
        self.attn_backends = [SimpleNamespace(forward_metadata=None) for _ in range(self.speculative_num_steps)]


def adopted(backend: Any, types: EngineTypes = TYPES) -> Any:
    """`backend` with our metadata."""
    return adopt(backend, MetadataSource(backend, types))


def forward_batch(mode: Mode, req: torch.Tensor, seq_lens: torch.Tensor, loc: torch.Tensor, **extra: Any) -> Any:
    extra.setdefault("spec_info", None)
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=extra.pop("batch_size", len(req)),
        req_pool_indices=req,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens.cpu(),
        out_cache_loc=loc,
        **extra,
    )
