"""Builds the metadata of one SGLang backend, and hands it over in SGLang's objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from dsv4_backend.adapters.sglang import batches
from dsv4_backend.adapters.sglang.objects import (
    Clamped,
    EngineTypes,
    compress_plans,
    core_metadata,
    with_own_memory,
)
from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import RATIOS, CacheGeometry
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_backend.plans import PACKED_MAX_ROWS
from dsv4_backend.tables import RequestTables

WINDOW = 128

Counts = dict[int, tuple[int, int]]


class MetadataSource:
    """What a backend of SGLang asks for metadata. It keeps nothing of a batch.

    Args:
        backend: SGLang's backend. Read: `token_to_kv_pool`, `req_to_token`, `page_size`, what its release calls the
            number of entries that the indexer selects, `speculative_num_draft_tokens` and `speculative_num_steps`.
            Called: `init_forward_metadata_indexer`.
        types: the classes to hand over in.

    Attributes:
        eager: a step without a graph is being built, in tensors that no graph knows. See `building_eagerly`.

    Raises:
        ValueError: the backend, its model or its pool is of a kind that we do not build for; the message says which.
    """

    def __init__(self, backend: Any, types: EngineTypes) -> None:
        refuse(backend)
        self._backend, self._types, self._clamped = backend, types, Clamped()
        self.ratios = pool_ratios(backend.token_to_kv_pool)
        self.num_draft_tokens = int(getattr(backend, "speculative_num_draft_tokens", None) or 0)
        self.num_steps = int(getattr(backend, "speculative_num_steps", None) or 0)
        self.geometry = pool_geometry(backend.token_to_kv_pool, backend.page_size, self.ratios, self.num_draft_tokens)
        self._config = replace(DSV4Config.v4_flash(), index_topk=int(getattr(backend, types.release.backend_topk)))
        self.eager = False
        self._builders: dict[bool, MetadataBuilder] = {}
        self._places: tuple[int, ...] = ()
        self._captured_places: tuple[int, ...] = ()

    @property
    def builder(self) -> MetadataBuilder:
        """The builder of what is built now, made when it is first needed: only then does the pool have its mapping."""
        return self._builder(self.eager)

    def _builder(self, eager: bool) -> MetadataBuilder:
        """One for graphs, one for steps without.

        Both give a number of rows the front of tensors for the next power of two. Graphs can share them, since each
        builds what it reads, and they run one after another.
        """
        req_to_token, mapping, places = self._tables()
        if places != self._places:
            self._builders.clear()
            self._places = places
        found = self._builders.get(eager)
        if found is None:
            found = self._builders[eager] = MetadataBuilder(
                self._config,
                self.geometry,
                RequestTables(req_to_token, mapping),
                max_rows=PACKED_MAX_ROWS,
                max_seq_len=self.longest,
                ratios=self.ratios,
                draft_window="frozen",
            )
        return found

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Request table and window mapping as they are now, and what tells them from others."""
        req_to_token = self._backend.req_to_token
        mapping = self._backend.token_to_kv_pool.full_to_swa_index_mapping.detach()
        return req_to_token, mapping, (req_to_token.data_ptr(), mapping.data_ptr(), *req_to_token.shape, len(mapping))

    def follow_tables(self, in_capture: bool) -> None:
        """Before each graph: a capture notes which tables it reads, and a replay wants them to be there still.

        Raises:
            ValueError: a replay would read tables that were replaced since, and write where nobody looks.
        """
        places = self._tables()[2]
        if in_capture:
            self._captured_places = places
        elif self._captured_places and places != self._captured_places:
            raise ValueError(
                "full_to_swa_index_mapping, req_to_token: expected those that the graphs were captured with, got others"
            )

    @contextlib.contextmanager
    def building_eagerly(self) -> Iterator[None]:
        """What is built in this block has no graph."""
        self.eager = True
        try:
            yield
        finally:
            self.eager = False

    @property
    def longest(self) -> int:
        """Longest length of a request."""
        return int(self._backend.req_to_token.shape[1])

    def decode(self, raw: Any) -> Any:
        """A DSV4Metadata for a DSV4RawDecodeMetadata, whose tensors a graph may read again at every replay."""
        return self._hand_over(self._build(batches.decode_batch(raw)))

    def verify(self, raw: Any) -> Any:
        """The same for a DSV4RawVerifyMetadata."""
        batch = batches.verify_batch(raw, self.num_draft_tokens)
        cut = batch.ragged and batch.device.type == "cpu"  # to the slots that are live
        return self._hand_over(self._build(batch, raw.out_cache_loc.shape[0] if cut else None))

    def idle(self, num_rows: int) -> Any:
        """The metadata of a rank without requests: `num_rows` rows of padding."""
        none = torch.zeros(0, dtype=torch.int64, device=self._backend.req_to_token.device)
        return self._hand_over(self._build(RawBatch(ForwardMode.IDLE, none, none, none.new_zeros(num_rows))))

    def extend(
        self,
        batch: RawBatch,
        host_lens: tuple[Sequence[int], Sequence[int]],
        max_seq_len: int,
        *,
        in_graph: bool = False,
        own_memory: bool = False,
    ) -> Any:
        """The metadata of a prompt step.

        Args:
            batch: see `batches.extend_batch`.
            host_lens: lengths and extend lengths of its real requests.
            max_seq_len: the tables get the pages of this length.
            in_graph: of a step whose graph was captured: plans have a row for each row of the step.
            own_memory: in memory that stays as it is, to be refreshed by SGLang's own copy.
        """
        meta = self._build(batch, eager=True)
        if own_memory:
            meta = with_own_memory(meta)
        counts: Counts | None = None
        if not in_graph:
            counts = {ratio: batches.plan_row_counts(*host_lens, ratio, self.geometry) for ratio in self.ratios}
        return self._hand_over(
            meta, counts, is_prefill=True, max_seq_len=max_seq_len, fixed=False, use_prefill_cuda_graph=in_graph
        )

    def draft_extend(self, batch: RawBatch) -> Any:
        """The metadata of the step that fills a draft model's cache behind a verify."""
        return self._hand_over(self._build(batch), is_prefill=True)

    def draft_steps(self, batch: RawBatch) -> list[Any]:
        """The metadata of the draft steps that run a forward, one object a step, in one launch."""
        self.expect_window_only()
        return [self._hand_over(meta) for meta in self.builder.build_draft_steps(batch, None, "frozen")]

    def expect_window_only(self) -> None:
        """Raises ValueError unless the draft model is of layers without compression, as SGLang's are."""
        if self.ratios:
            raise ValueError(
                f"draft model: expected layers of ratio 0 only, got ratios {self.ratios}: SGLang's draft steps all "
                "look from the committed tokens, for which there are no plans"
            )

    def prebuild(self, raw: Any) -> None:
        """Makes the tensors of a graph before it is captured."""
        if hasattr(raw, "extend_seq_lens"):
            self.verify(raw)
        else:
            self.decode(raw)

    def _build(self, batch: RawBatch, num_rows: int | None = None, eager: bool | None = None) -> AttnMetadata:
        builder = self._builder(self.eager if eager is None else eager)
        return builder.build(batch, num_rows)

    def _hand_over(
        self,
        meta: AttnMetadata,
        counts: Counts | None = None,
        *,
        is_prefill: bool = False,
        max_seq_len: int | None = None,
        fixed: bool | None = None,
        use_prefill_cuda_graph: bool = False,
    ) -> Any:
        clamped = self._clamped.lengths(meta, fixed=not self.eager if fixed is None else fixed)
        core = core_metadata(self._types, meta, clamped, is_prefill=is_prefill, max_seq_len=max_seq_len)
        if use_prefill_cuda_graph:
            core.swa_out_cache_loc = None  # SGLang translates the slots of a captured prompt itself, in place
        indexer = None
        if 4 in self.ratios:
            indexer = self._backend.init_forward_metadata_indexer(core, use_prefill_cuda_graph=use_prefill_cuda_graph)
        plans = compress_plans(self._types, meta.plans, counts)
        metadata = self._types.metadata(
            core_attn_metadata=core,
            indexer_metadata=indexer,
            c4_compress_metadata=plans.get(4),
            c128_compress_metadata=plans.get(128),
        )
        metadata.dsv4_complete = True  # nothing is left for SGLang to fill in inside a graph
        return metadata


def refuse(backend: Any) -> None:
    """Raises ValueError where `backend` serves something else than plain DeepSeek-V4."""
    spec = getattr(backend.model_runner, "spec_algorithm", None)
    controller = getattr(backend, "online_c128_mtp", None)
    window = getattr(backend.token_to_kv_pool, "request_window", None)
    for found, what in (
        (getattr(backend, "is_dsv41", False) or getattr(backend, "low_ratios", ()), "DeepSeek-V4.1"),
        (spec is not None and spec.is_dspark(), "DSpark"),
        (getattr(backend, "is_dspark_draft", False), "a DSpark draft"),
        (controller is not None and _called(controller.enabled), "online ratio-128 state"),
        (backend.hisparse_coordinator is not None, "HiSparse"),
        (getattr(backend, "encoder_replay", False), "encoder replay"),
        (window is not None, "a window pool a request"),
        (getattr(backend, "topk", 0) not in (0, 1), "drafts with branches"),
    ):
        if found:
            raise ValueError(f"backend: expected plain DeepSeek-V4 with chains of drafts, got {what}")


def pool_ratios(pool: Any) -> tuple[int, ...]:
    """Compression ratios of the layers that a DeepSeekV4TokenToKVPool serves."""
    found = {layer[0] for layer in pool.layer_mapping}
    return tuple(ratio for ratio in RATIOS if ratio in found)


def pool_geometry(pool: Any, page_size: int, ratios: tuple[int, ...], num_draft_tokens: int) -> CacheGeometry:
    """The geometry of a DeepSeekV4TokenToKVPool; the ring of a ratio that it lacks is that of its draft tokens."""
    rings = {f"c{ratio}_ring": int(pool.get_ring_size(ratio)) for ratio in ratios}
    usual = CacheGeometry.for_drafts(num_draft_tokens)
    geometry = replace(usual, page_size=int(page_size), swa_page_size=int(pool.swa_page_size), window=WINDOW, **rings)
    geometry.check_drafts(num_draft_tokens)
    return geometry


def _called(value: Any) -> Any:
    return value() if callable(value) else value
