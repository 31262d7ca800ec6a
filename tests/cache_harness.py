"""Serves made-up requests on one layer's cache: prompts in chunks, decode, rejected drafts, shared prefixes.

What must be stored is computed from the whole sequence in float64, without plans, pages or state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dsv4_backend import CacheGeometry, CacheSize, DSV4Config, ForwardMode, LayerCache, MetadataBuilder, RawBatch
from dsv4_backend.layer_writer import CompressorWeights, LayerWriter
from dsv4_backend.layouts import bias_shape, state_width
from dsv4_backend.page_pool import PagePool
from dsv4_backend.reference.kv_store import load_entries
from dsv4_backend.rope import rope_table
from dsv4_backend.table_mirror import TableMirror

EPS = 1e-6
POISON = 0xFF  # NaN in every format
SMALL = (32, 16)
"""Head and rope dimension that the interpreter is quick with."""


def small_config(ratio: int, head: tuple[int, int] = SMALL, index_dim: int = 32, window: int = 16) -> DSV4Config:
    head_dim, rope_dim = head
    return DSV4Config(
        hidden_size=64,
        num_heads=4,
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=24,
        window=window,
        index_topk=8,
        index_heads=4,
        index_head_dim=index_dim,
        compress_ratios=(ratio,),
        max_position=2048,
    )


def small_geometry(drafts: bool = False, **sizes: int) -> CacheGeometry:
    rings = dict(c4_ring=16, c128_ring=256) if drafts else {}
    return CacheGeometry(**{"page_size": 128, "swa_page_size": 64, "window": 16, **rings, **sizes})


def pool_for(geom: CacheGeometry, lanes: int, tokens: int, seed: int) -> PagePool:
    """Pages, and window pages, for all tokens of so many requests."""
    pages = -(-tokens // geom.page_size) * lanes
    return PagePool(
        page_size=geom.page_size,
        window_page_size=geom.swa_page_size,
        num_pages=pages,
        num_window_pages=pages * (geom.page_size // geom.swa_page_size),
        max_requests=lanes,
        max_len=tokens,
        seed=seed,
    )


@dataclass(eq=False, repr=False)
class Lane:
    """A request: its row, how many tokens are committed, and the rows of all tokens it will ever have."""

    row: int
    streams: dict[str, torch.Tensor]
    length: int = 0
    pooled: dict[str, torch.Tensor] = field(default_factory=dict)  # of all its tokens, once they are asked for


class Harness:
    """A layer's cache with requests on it; everything is poisoned at first."""

    def __init__(
        self,
        impl: str,
        device: str,
        ratio: int,
        *,
        head: tuple[int, int] = SMALL,
        index_dim: int = 32,
        kv: str = "fp32",
        geom: CacheGeometry | None = None,
        tokens: int = 400,
        lanes: int = 3,
        seed: int = 0,
    ) -> None:
        self.ratio, self.geom = ratio, geom or small_geometry()
        self.cfg = small_config(ratio, head, index_dim, self.geom.window)
        self.device, self.tokens = torch.device(device), tokens
        self.pool = pool_for(self.geom, lanes, tokens, seed)
        self.mirror = TableMirror(self.pool, self.device)
        size = CacheSize(self.pool.num_pages + 1, self.pool.num_window_pages + 1, lanes + 1)
        self.cache = LayerCache.empty(self.cfg, self.geom, size, ratio, format=kv, device=device)
        for tensor in self.tensors().values():
            tensor.view(torch.uint8).fill_(POISON)
        columns = self.pool.req_to_token.shape[1]
        self.builder = MetadataBuilder(
            self.cfg,
            self.geom,
            self.mirror.tables,
            max_rows=lanes * tokens,
            max_seq_len=columns,
            ratios=(ratio,) if ratio else (),
            impl=impl,
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.rope = rope_table(self.cfg, ratio, columns, device)
        self.writer = LayerWriter(
            self.cache,
            self.random(head[0]).abs() + 0.5,
            self.rope,
            compressor=self._weights(head[0]) if ratio else None,
            indexer=self._weights(index_dim) if ratio == 4 else None,
            eps=EPS,
            impl=impl,
        )
        self.lanes: list[Lane] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that is stored into."""
        cache = self.cache
        pools = {"window": cache.window, "compressed": cache.compressed, "index_keys": cache.index_keys}
        found = {name: pool.data for name, pool in pools.items() if pool is not None}
        states = {"state": cache.state, "index_state": cache.index_state}
        return found | {name: state for name, state in states.items() if state is not None}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def _weights(self, head_dim: int) -> CompressorWeights:
        return CompressorWeights(self.random(*bias_shape(self.ratio, head_dim)), self.random(head_dim).abs() + 0.5)

    def streams(self, count: int) -> dict[str, torch.Tensor]:
        """Rows of `count` tokens, as `LayerWriter.write` takes them."""
        found = {"kv": self.random(count, self.cfg.head_dim)}
        if self.ratio:
            found["kv_score"] = self.random(count, state_width(self.ratio, self.cfg.head_dim)) * 2
        if self.ratio == 4:
            found["index_score"] = self.random(count, state_width(4, self.cfg.index_head_dim)) * 2
        return found

    def open(self, shared: Lane | None = None, shared_pages: int = 0) -> Lane:
        """A new request, on top of the first full pages of another one, whose tokens it then has, too."""
        pages = list(self.pool.pages(shared.row))[:shared_pages] if shared else []
        streams = self.streams(self.tokens)
        length = len(pages) * self.geom.page_size
        if shared:
            for name, rows in streams.items():
                rows[:length] = shared.streams[name][:length]
        lane = Lane(self.pool.open(pages, self.geom.window), streams, length)
        self.lanes.append(lane)
        return lane

    def extend(self, sizes: dict[Lane, int], padded_rows: int | None = None) -> None:
        """A prompt step: so many tokens of each request."""
        self._step(ForwardMode.EXTEND, sizes, sizes, padded_rows)

    def decode(self, lanes: list[Lane], padding: int = 0) -> None:
        """One token of each request; `padding` rows of request 0 behind them."""
        self._step(ForwardMode.DECODE, dict.fromkeys(lanes, 1), dict.fromkeys(lanes, 1), len(lanes) + padding)

    def verify(self, widths: dict[Lane, int], accepts: dict[Lane, int]) -> None:
        """A verify step: rows behind the accepted ones are rejected, and other than the tokens to come."""
        self._step(ForwardMode.TARGET_VERIFY, widths, accepts)

    def _step(
        self, mode: ForwardMode, sizes: dict[Lane, int], accepts: dict[Lane, int], padded_rows: int | None = None
    ) -> None:
        slots, parts = [], []
        for lane, size in sizes.items():
            self.pool.grow(lane.row, lane.length + size)
            slots.append(torch.from_numpy(self.pool.slots(lane.row, lane.length, lane.length + size).copy()))
            accepted = accepts[lane]
            drafts = self.streams(size - accepted)
            parts.append(
                {
                    name: torch.cat((rows[lane.length : lane.length + accepted], 30 * drafts[name]))
                    for name, rows in lane.streams.items()
                }
            )
        self.mirror.refresh()
        before = torch.tensor([lane.length for lane in sizes], device=self.device)
        count = torch.tensor(list(sizes.values()), device=self.device)
        ragged = mode is ForwardMode.EXTEND or len(set(sizes.values())) > 1
        meta = self.builder.build(
            RawBatch(
                mode,
                torch.tensor([lane.row for lane in sizes], device=self.device),
                before if mode is ForwardMode.TARGET_VERIFY else before + count,
                torch.cat(slots).to(self.device),
                extend_lens=count if ragged else None,
                num_draft_tokens=max(sizes.values()) if mode is ForwardMode.TARGET_VERIFY else 0,
            ),
            padded_rows,
        )
        self.builder.check()
        rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        padding = meta.num_rows - len(rows["kv"])
        self.writer.write(meta, **{name: _padded(part, padding) for name, part in rows.items()})
        for lane in sizes:
            lane.length += accepts[lane]
            self.pool.trim_window(lane.row, lane.length - self.geom.window)
        self.mirror.refresh()

    def window_slots(self, lane: Lane) -> tuple[range, torch.Tensor]:
        """Positions that the window of a request's next token can still see, and their window slots."""
        positions = range(max(0, lane.length - self.geom.window), lane.length)
        tables = self.mirror.tables
        return positions, tables.full_to_swa[tables.req_to_token[lane.row, positions.start : positions.stop].long()]

    def entry_slots(self, lane: Lane) -> torch.Tensor:
        """Slots of a request's closed entries."""
        ends = torch.arange(1, lane.length // self.ratio + 1, device=self.device) * self.ratio - 1
        return self.mirror.tables.req_to_token[lane.row, ends].long() // self.ratio

    def stored(self, lane: Lane) -> dict[str, torch.Tensor]:
        """What a request's next token would read."""
        found = {"window": load_entries(self.cache.window, self.window_slots(lane)[1])}
        for name, pool in (("compressed", self.cache.compressed), ("index_keys", self.cache.index_keys)):
            if pool is not None:
                found[name] = load_entries(pool, self.entry_slots(lane))
        return found

    def expected(self, lane: Lane) -> dict[str, torch.Tensor]:
        """The same in float64, from the tokens alone; without Hadamard transform."""
        positions, writer = list(self.window_slots(lane)[0]), self.writer
        kv = lane.streams["kv"][positions].double()
        found = {"window": norm_rope(kv, writer.kv_norm, torch.tensor(positions, dtype=torch.int64), self.rope)}
        for name, stream, weights in (
            ("compressed", "kv_score", writer.compressor),
            ("index_keys", "index_score", writer.indexer),
        ):
            if weights is not None:
                if name not in lane.pooled:
                    lane.pooled[name] = pool_tokens(lane.streams[stream].double(), weights.bias.double(), self.ratio)
                pooled = lane.pooled[name][: lane.length // self.ratio]
                first = torch.arange(len(pooled)) * self.ratio
                found[name] = norm_rope(pooled, weights.norm, first, self.rope)
        return found

    def check(self, lane: Lane, tolerance: float = 1e-5) -> None:
        """Float32 entries are those of the whole sequence."""
        stored = self.stored(lane)
        for name, expected in self.expected(lane).items():
            assert stored[name].shape == expected.shape, name
            if len(expected):
                worst = float((stored[name].double() - expected).abs().max())
                assert worst <= tolerance, f"{name} at {lane.length} tokens: {worst}"


def _padded(rows: torch.Tensor, padding: int) -> torch.Tensor:
    """`rows`, with padding that would show wherever it got."""
    return torch.cat((rows, torch.full((padding, rows.shape[1]), torch.nan, device=rows.device)))


def pool_tokens(rows: torch.Tensor, bias: torch.Tensor, ratio: int) -> torch.Tensor:
    """[T // ratio, head_dim]: entry by entry, token by token, as the model defines them."""
    dim = bias.shape[1] // (2 if ratio == 4 else 1)
    entries = []
    for entry in range(len(rows) // ratio):
        values, scores = [], []
        for token in range(max(0, (entry - (ratio == 4)) * ratio), (entry + 1) * ratio):
            own = token >= entry * ratio
            if ratio == 4:
                half = dim if own else 0
                values.append(rows[token, half : half + dim])
                scores.append(rows[token, 2 * dim + half : 3 * dim + half] + bias[token % 4, half : half + dim])
            else:
                values.append(rows[token, :dim])
                scores.append(rows[token, dim:] + bias[token % 128])
        weight = torch.stack(scores).softmax(dim=0)
        entries.append((weight * torch.stack(values)).sum(dim=0))
    return torch.stack(entries) if entries else rows.new_zeros((0, dim))


def norm_rope(values: torch.Tensor, norm: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Norm and rotation in float64."""
    values = values / (values.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * norm.double()
    table = rope.double()[positions.to(rope.device)]
    start = values.shape[1] - rope.shape[1]
    shape = (len(values), rope.shape[1] // 2, 2)
    turned = torch.view_as_complex(values[:, start:].reshape(shape).contiguous())
    turned = turned * torch.view_as_complex(table.reshape(shape).contiguous())
    return torch.cat((values[:, :start], torch.view_as_real(turned).flatten(1)), dim=1)
