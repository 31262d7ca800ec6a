"""Compares an attention layer with goldens, through cache, metadata, plans and kernels.

Several sequences run side by side on shuffled pages: the golden's own, and two of its prefixes, which have the same
answers as far as they go. Each is cut into chunks of its own and begins a step after the one before it. All memory is
poisoned at first, so that reading what nobody wrote shows.

A golden with all weights runs the whole layer (`attention_records`). One without runs what stores the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4_backend import chunks as chunking
from dsv4_backend.attention_compare import NORM_TOLERANCE, Finding, close, close_by_norm
from dsv4_backend.attention_goldens import AttentionGolden
from dsv4_backend.attention_records import Records
from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.cache import CacheSize, DSV4Cache, LayerCache
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.layer_writer import CompressorWeights, LayerWriter
from dsv4_backend.layouts import EntryPool
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_backend.page_pool import PagePool
from dsv4_backend.reference.kv_store import hadamard, load_entries
from dsv4_backend.rope import rope_table
from dsv4_backend.table_mirror import TableMirror

_PAGE_SIZE, _WINDOW_PAGE_SIZE = 128, 64
_POISON = 0xFF  # a NaN in every format


@dataclass(frozen=True)
class Verdict:
    """What came of a golden.

    Attributes:
        text: largest errors; or the first difference; or why it was skipped.
        ok: None: skipped.
    """

    ok: bool | None
    text: str


def verify_attention(
    golden: AttentionGolden, impl: str, device: torch.device, *, chunks: str, kv: str, geom: CacheGeometry | None = None
) -> Verdict:
    """Checks every answer that a golden has.

    Args:
        golden: the layer.
        impl: "triton" or "torch".
        device: where to run.
        chunks: see `chunks.split`.
        kv: format of the cache, "fp32", "bf16" or "fp8".
        geom: geometry of the cache; None: small pages and the smallest rings.
    """
    cfg = golden.config
    if kv == "fp8" and (cfg.head_dim - cfg.rope_dim) % 64:
        return Verdict(None, f"{cfg.head_dim - cfg.rope_dim} channels that do not rotate are no blocks of 64")
    if geom is None:
        geom = CacheGeometry(page_size=_PAGE_SIZE, swa_page_size=_WINDOW_PAGE_SIZE, window=cfg.window)
    try:
        errors = _Run(golden, impl, device, kv, geom).run(chunks)
    except ValueError as error:
        return Verdict(False, f"refused: {error}")
    bad = [found for found in errors if not found.ok]
    if bad:
        return Verdict(False, bad[0].text)
    worst: dict[str, Finding] = {}
    for found in errors:
        if found.name not in worst or found.size > worst[found.name].size:
            worst[found.name] = found
    return Verdict(True, ", ".join(found.text for found in worst.values()) + _unchecked(golden))


def _unchecked(golden: AttentionGolden) -> str:
    """What a golden does not let us check."""
    found = ""
    if golden.missing_weights:
        found += f"; without the layer's {', '.join(golden.missing_weights)} nothing but what is stored"
    elif golden.missing_answers:
        found += f"; without {', '.join(golden.missing_answers)}"
    return found


@dataclass(eq=False)
class _Lane:
    """A sequence: its row of the request table, how many tokens it has in all and so far, and the chunks to come."""

    row: int
    total: int
    chunks: Iterator[int]
    starts_at: int
    length: int = 0


class _Run:
    """A golden's sequences on one cache."""

    def __init__(self, golden: AttentionGolden, impl: str, device: torch.device, kv: str, geom: CacheGeometry) -> None:
        cfg, tokens, self.ratio = golden.config, golden.num_tokens, golden.ratio
        self.golden, self.kv, self.device, self.geom = golden, kv, device, geom
        self.totals = [tokens, max(1, tokens - 37), max(1, tokens // 2)]
        pages = -(-tokens // geom.page_size) * len(self.totals)
        parts = geom.page_size // geom.swa_page_size
        self.pages = PagePool(
            page_size=geom.page_size,
            window_page_size=geom.swa_page_size,
            num_pages=pages,
            num_window_pages=pages * parts,
            max_requests=len(self.totals) + 1,
            max_len=tokens,
        )
        self.mirror = TableMirror(self.pages, device)
        size = CacheSize(pages + 1, pages * parts + 1, len(self.totals) + 2)
        self.cache = DSV4Cache(cfg, geom, size, format=kv, device=device).layers[0]
        poison(self.cache)
        self.builder = MetadataBuilder(
            cfg,
            geom,
            self.mirror.tables,
            max_rows=tokens * len(self.totals),
            max_seq_len=self.pages.req_to_token.shape[1],
            ratios=(self.ratio,) if self.ratio else (),
            impl=impl,
        )
        self.records = None if golden.missing_weights else Records(golden, self.cache, kv, impl, device)
        if self.records is None:
            self.writer = golden_writer(golden, self.cache, impl, device)
            self.inputs = golden_inputs(golden, device)

    def run(self, chunks: str) -> list[Finding]:
        lanes = [
            _Lane(self.pages.open(), total, chunking.split(chunks, total, lane), lane)
            for lane, total in enumerate(self.totals)
        ]
        errors, step = [], 0
        while any(lane.length < lane.total for lane in lanes):
            batch = [(lane, next(lane.chunks)) for lane in lanes if lane.starts_at <= step and lane.length < lane.total]
            if batch:
                errors += self._step(batch)
            step += 1
        self.builder.check()
        for lane in lanes:
            errors += self._window(lane, max(0, lane.total - self.geom.window))
            errors += self._compressed(lane)
        return errors + (self.records.findings(self._entry_slots()) if self.records else [])

    def _step(self, batch: list[tuple[_Lane, int]]) -> list[Finding]:
        for lane, size in batch:
            self.pages.grow(lane.row, lane.length + size)
        self.mirror.refresh()
        device = self.device
        slots = [self.pages.slots(lane.row, lane.length, lane.length + size) for lane, size in batch]
        rows = torch.cat([torch.arange(lane.length, lane.length + size) for lane, size in batch]).to(device)
        decode = all(size == 1 for _, size in batch)
        raw = RawBatch(
            ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            torch.tensor([lane.row for lane, _ in batch], device=device),
            torch.tensor([lane.length + size for lane, size in batch], device=device),
            torch.cat([torch.from_numpy(part.copy()) for part in slots]).to(device),
            extend_lens=None if decode else torch.tensor([size for _, size in batch], device=device),
        )
        meta = self.builder.build(raw)
        if self.records is None:
            self._write(meta, rows)
        else:
            self.records.step(meta, rows, meta.req_pool_indices_per_row.clone(), self._entry_slots())
        errors = []
        for lane, size in batch:
            begin, lane.length = lane.length, lane.length + size
            errors += self._window(lane, begin)
            self.pages.trim_window(lane.row, lane.length - self.geom.window)
        return errors

    def _write(self, meta: AttnMetadata, rows: torch.Tensor) -> None:
        """Stores a step without the layer, of projections in float64."""
        kv, score, index = self.inputs
        self.writer.write(
            meta, kv[rows], None if score is None else score[rows], None if index is None else index[rows]
        )

    def _entry_slots(self) -> torch.Tensor:
        """int64 [requests, entries]: slots of compressed entries; 0 where there is none yet."""
        table = self.mirror.tables.req_to_token
        if not self.ratio:
            return table[:, :0].long()
        ends = torch.arange(1, self.golden.num_tokens // self.ratio + 1, device=self.device) * self.ratio - 1
        return table[:, ends].long() // self.ratio

    def _window(self, lane: _Lane, begin: int) -> list[Finding]:
        """Window entries from position `begin` on."""
        tables = self.mirror.tables
        slots = tables.full_to_swa[tables.req_to_token[lane.row, begin : lane.length].long()]
        return self._compare("kv_rope", self.cache.window, slots, begin)

    def _compressed(self, lane: _Lane) -> list[Finding]:
        if not self.ratio:
            return []
        slots = self._entry_slots()[lane.row, : lane.length // self.ratio]
        assert self.cache.compressed is not None
        errors = self._compare("comp_kv", self.cache.compressed, slots, 0)
        if self.cache.index_keys is not None:
            errors += self._compare("idx_k", self.cache.index_keys, slots, 0)
        return errors

    def _compare(self, name: str, pool: EntryPool, slots: torch.Tensor, begin: int) -> list[Finding]:
        """Entries of `slots` with rows `begin` and up of the golden's array `name`."""
        if not len(slots):
            return []
        ours = load_entries(pool, slots)
        if pool.layout.hadamard:
            ours = hadamard(ours)
        rows = torch.arange(begin, begin + len(slots), device=self.device)
        theirs = self.golden.tensor(name, self.device)[begin : begin + len(slots)]
        if self.kv == "fp32":
            return [close(name, ours, theirs, rows, rope_dim=self.golden.config.rope_dim)]
        limit = NORM_TOLERANCE[self.kv]
        return [close_by_norm(name, ours, theirs, rows, limit, row_tolerance=limit)]


def poison(cache: LayerCache) -> None:
    """Fills a layer's cache with NaN."""
    pools = (cache.window, cache.compressed, cache.index_keys)
    tensors = [pool.data for pool in pools if pool is not None]
    tensors += [state for state in (cache.state, cache.index_state) if state is not None]
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(_POISON)


def golden_writer(golden: AttentionGolden, cache: LayerCache, impl: str, device: torch.device) -> LayerWriter:
    """What stores the golden's layer into `cache`."""

    def weights(prefix: str) -> CompressorWeights:
        bias = golden.tensor(f"w_{prefix}_ape", device)
        return CompressorWeights(bias, golden.tensor(f"w_{prefix}_norm", device))

    return LayerWriter(
        cache,
        golden.tensor("w_kv_norm", device),
        rope_table(golden.config, golden.ratio, golden.num_tokens, device),
        compressor=weights("comp") if golden.ratio else None,
        indexer=weights("idx_comp") if golden.ratio == 4 else None,
        eps=golden.config.rms_norm_eps,
        impl=impl,
    )


def golden_inputs(
    golden: AttentionGolden, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """kv, kv_score and index_score of all tokens, as `LayerWriter.write` takes them."""
    kv = golden.project(("w_wkv",), device)
    score = golden.project(("w_comp_wkv", "w_comp_wgate"), device) if golden.ratio else None
    index = golden.project(("w_idx_comp_wkv", "w_idx_comp_wgate"), device) if golden.ratio == 4 else None
    return kv, score, index
