"""What a layer made of each token of a golden, and how it compares with the answers."""

from __future__ import annotations

from collections import defaultdict

import torch

from dsv4_backend.attention import sparse_attention
from dsv4_backend.attention_compare import (
    NORM_TOLERANCE,
    OWN_SCORE_TOLERANCE,
    OWN_TOLERANCE,
    Finding,
    close,
    close_by_norm,
    compare_selection,
)
from dsv4_backend.attention_exact import exact_context, exact_output, exact_scores, query_vectors
from dsv4_backend.attention_goldens import ROW_ANSWERS, AttentionGolden
from dsv4_backend.cache import LayerCache
from dsv4_backend.indexer import index_scores
from dsv4_backend.layer import DSV4Attention, Projections
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.reference.kv_store import hadamard

_ON_ENTRIES = " from our own on equally rounded entries"


class WatchedLayer(DSV4Attention):
    """A layer that keeps what its last step made on the way to its output."""

    made: Projections
    context: torch.Tensor

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projections:
        self.made = super().project(x, positions)
        return self.made

    def attend(self, query: torch.Tensor, meta: AttnMetadata, cache: LayerCache) -> torch.Tensor:
        self.context = super().attend(query, meta, cache)
        return self.context


class Records:
    """Collects the steps of a golden's sequences and compares them all at the end.

    Args:
        golden: the layer, with all of its weights.
        cache: the layer's cache.
        kv: its format.
        impl: "triton" or "torch".
        device: where to run.
    """

    def __init__(self, golden: AttentionGolden, cache: LayerCache, kv: str, impl: str, device: torch.device) -> None:
        self.golden, self.cache, self.kv, self.impl, self.device = golden, cache, kv, impl, device
        self.layer = WatchedLayer.from_weights(
            golden.weights(device), golden.config, golden.ratio, impl=impl, device=device, dtype=torch.float32
        )
        self._x = golden.tensor("x", device)
        self._kept: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        # Which row of the answers for some tokens only is a token's; -1: none.
        self._listed = torch.full((golden.num_tokens,), -1, device=device)
        if "rows" in golden.arrays:
            rows = golden.tensor("rows", device).long()
            self._listed[rows] = torch.arange(len(rows), device=device)

    def step(self, meta: AttnMetadata, rows: torch.Tensor, requests: torch.Tensor, entry_slots: torch.Tensor) -> None:
        """Runs the layer on a step.

        Args:
            meta: the step.
            rows: int64 [n]: the golden's token that each row is.
            requests: int64 [n]: the row's request. Kept, so no view of metadata, which the next build writes again.
            entry_slots: int64 [requests, entries]: slots of their compressed entries.
        """
        layer, cache = self.layer, self.cache
        out = layer(self._x[rows], meta, cache)
        self._keep(rows=rows, requests=requests, out=out)
        if layer.made.kv_score is not None:
            values, scores = layer.made.kv_score.chunk(2, dim=1)
            self._keep(comp_raw_kv=values, comp_raw_gate=scores)
        if meta.c4_sparse_page_indices is not None:
            self._keep(selected=meta.c4_sparse_page_indices.clone())
        if self.kv != "fp32":
            lists = [(cache.window, meta.swa_page_indices, meta.swa_lengths)]
            indices, lengths, each = layer.compressed_lists(meta)
            if cache.compressed is not None and indices is not None and lengths is not None:
                lists.append((cache.compressed, indices if each is None else indices[each], lengths))
            exact = exact_context(layer.made.query, lists, layer.sink, meta.positions, layer.rope)
            self._keep(own_ctx=layer.context, exact_ctx=exact)
        picked = (self._listed[rows] >= 0).nonzero().squeeze(1)
        if len(picked):
            self._keep(listed=rows[picked], q_latent=layer.made.latent[picked], q_rope=layer.made.query[picked])
            self._keep(ctx=layer.context[picked], ctx_rotated=self._rotated(meta, picked))
            if layer.ratio == 4:
                self._index(meta, picked, entry_slots[requests[picked]])

    def _keep(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            self._kept[name].append(value)

    def _rotated(self, meta: AttnMetadata, picked: torch.Tensor) -> torch.Tensor:
        """What the heads of some rows read, before it is turned back."""
        indices, lengths, each = self.layer.compressed_lists(meta)
        if indices is not None:
            each = picked.int() if each is None else each[picked]
        return sparse_attention(
            self.layer.made.query[picked],
            self.cache.window,
            meta.swa_page_indices[picked],
            meta.swa_lengths[picked],
            self.cache.compressed,
            indices,
            None if lengths is None else lengths[picked],
            sink=self.layer.sink,
            compressed_rows=each,
            impl=self.impl,
        )

    def _index(self, meta: AttnMetadata, picked: torch.Tensor, slots: torch.Tensor) -> None:
        """The indexer's queries and scores of some rows."""
        made, keys = self.layer.made, self.cache.index_keys
        assert keys is not None
        assert made.head_weights is not None
        assert meta.c4_lengths is not None
        assert made.index_query is not None
        some = made._replace(index_query=made.index_query[picked], head_weights=made.head_weights[picked])
        query = self.layer.index_query(some, meta.positions[picked], self.cache)
        vectors = query_vectors(query, made.head_weights[picked])
        lengths = meta.c4_lengths[picked]
        scores = torch.zeros(slots.shape, device=self.device)
        index_scores(
            query,
            keys,
            meta.page_table if meta.table_rows is not None else meta.page_table[picked],
            lengths,
            out=scores,
            table_rows=None if meta.table_rows is None else meta.table_rows[picked],
            impl=self.impl,
        )
        self._keep(idx_q=hadamard(vectors) if keys.layout.hadamard else vectors, idx_w=made.head_weights[picked])
        self._keep(idx_score=scores, exact_score=exact_scores(query, keys, slots, lengths))

    def findings(self, entry_slots: torch.Tensor) -> list[Finding]:
        """All comparisons, in the order in which things are computed."""
        kept = {name: torch.cat(values) for name, values in self._kept.items()}
        rows, listed = kept["rows"], kept.get("listed", self._listed[:0])
        found = [self._close(name, kept[name], rows) for name in ("comp_raw_kv", "comp_raw_gate") if self._has(name)]
        for name in ("q_latent", "q_rope"):
            if self._has(name):
                found.append(self._close(name, kept[name], listed, name == "q_rope"))
        if self.layer.ratio == 4:
            found += self._index_findings(kept, listed)
        same = torch.ones_like(rows, dtype=torch.bool)
        if self._has("topk_idx"):
            finding, same = self._selection(kept, rows, entry_slots)
            found.append(finding)
        alike = torch.ones(self.golden.num_tokens, dtype=torch.bool, device=self.device)
        alike[rows[~same]] = False
        for name in ("ctx_rotated", "ctx"):
            if self._has(name):
                found.append(self._output(name, kept[name], listed, alike))
        for name in ("out", "out_f64"):
            if self._has(name):
                at = self._listed[rows] >= 0 if name in ROW_ANSWERS else torch.ones_like(same)
                found.append(self._output(name, kept["out"][at], rows[at], alike))
        if self.kv != "fp32":
            exact = exact_output(kept["exact_ctx"], self.golden.weights(self.device), self.golden.config)
            for name, ours, theirs in (
                ("ctx", kept["own_ctx"], kept["exact_ctx"]),
                ("out", kept["out"], exact),
            ):
                found.append(close_by_norm(name, ours, theirs, rows, OWN_TOLERANCE, of=_ON_ENTRIES))
        return found

    def _index_findings(self, kept: dict[str, torch.Tensor], listed: torch.Tensor) -> list[Finding]:
        found = []
        if self._has("idx_q"):
            if self.kv == "fp32":
                found.append(self._close("idx_q", kept["idx_q"], listed, True))
            else:
                vectors, theirs = kept["idx_q"].flatten(0, 1), self._answer("idx_q", listed).flatten(0, 1)
                heads = listed.repeat_interleave(self.golden.config.index_heads)
                limit = NORM_TOLERANCE[self.kv]
                found.append(close_by_norm("idx_q", vectors, theirs, heads, limit, row_tolerance=limit))
        if self._has("idx_w"):
            found.append(self._close("idx_w", kept["idx_w"], listed))
        if self._has("idx_score"):
            theirs = self._answer("idx_score", listed)
            causal = torch.arange(theirs.shape[1], device=self.device) < ((listed + 1) // 4)[:, None]
            if self.kv == "fp32":
                found.append(close("idx_score", kept["idx_score"], theirs.where(causal, torch.nan), listed))
            else:  # queries and keys are both rounded; and a row may have few scores, near zero
                ours, limit = kept["idx_score"], 2 * NORM_TOLERANCE[self.kv]
                theirs = theirs.where(causal, 0.0)
                found.append(close_by_norm("idx_score", ours, theirs, listed, limit, row_tolerance=10.0))
        if self.kv != "fp32" and len(listed):
            ours, theirs = kept["idx_score"], kept["exact_score"]
            found.append(close_by_norm("idx_score", ours, theirs, listed, OWN_SCORE_TOLERANCE, of=_ON_ENTRIES))
        return found

    def _selection(
        self, kept: dict[str, torch.Tensor], rows: torch.Tensor, entry_slots: torch.Tensor
    ) -> tuple[Finding, torch.Tensor]:
        """`topk_idx`; a selected slot that is none of the row's own request counts as entry -2."""
        assert self.cache.compressed is not None
        requests, entries = entry_slots.shape
        at = torch.full((requests, self.cache.compressed.num_slots), -2, device=self.device)
        at.scatter_(1, entry_slots, torch.arange(entries, device=self.device).expand(requests, -1).contiguous())
        at[:, 0] = -2
        selected = kept["selected"].long()
        ours = at[kept["requests"][:, None], selected.clamp(min=0)].where(selected >= 0, -1)
        margin = self.golden.arrays.get("topk_margin")
        margins = torch.full_like(rows, -1) if margin is None else self.golden.tensor("topk_margin", self.device)[rows]
        return compare_selection(ours, self.golden.tensor("topk_idx", self.device)[rows].long(), margins, rows, self.kv)

    def _output(self, name: str, ours: torch.Tensor, rows: torch.Tensor, alike: torch.Tensor) -> Finding:
        """Contexts or outputs, on rows whose selection is the golden's."""
        ours, rows = ours[alike[rows]], rows[alike[rows]]
        if self.kv != "fp32":
            return close_by_norm(name, ours, self._answer(name, rows), rows, NORM_TOLERANCE[self.kv])
        return self._close(name, ours, rows, name.startswith("ctx"))

    def _close(self, name: str, ours: torch.Tensor, rows: torch.Tensor, turns: bool = False) -> Finding:
        rope_dim = self.golden.config.rope_dim if turns else 0
        return close(name, ours, self._answer(name, rows), rows, rope_dim=rope_dim)

    def _answer(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        answer = self.golden.tensor(name, self.device)
        return answer[self._listed[rows] if name in ROW_ANSWERS else rows]

    def _has(self, name: str) -> bool:
        return name in self.golden.arrays
