"""A small model on the attention backend: requests in chunks, decode and verification, with graphs and without."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from cache_harness import SMALL, pool_for, small_config, small_geometry
from dsv4_backend import (
    AttnMetadata,
    CacheSize,
    DSV4Attention,
    DSV4AttnBackend,
    DSV4Cache,
    DSV4DraftBackend,
    ForwardMode,
    RawBatch,
)
from dsv4_backend.table_mirror import TableMirror
from dsv4_graph_runner import BucketPolicy, StepGraphRunner

RATIOS = (0, 4, 128)
VOCAB = 64

each_executor = pytest.mark.parametrize(
    ("impl", "device", "executor"),
    [
        pytest.param("torch", "cpu", "eager", id="torch-cpu-eager"),
        pytest.param("triton", "cuda", "cuda_graph", id="triton-cuda-graph", marks=pytest.mark.gpu),
    ],
)


@dataclass(eq=False)
class Lane:
    """A request: its row, all tokens that it will ever have, and how many are committed."""

    row: int
    tokens: torch.Tensor
    length: int = 0


class World:
    """A model of one layer of each ratio, with its cache, tables and backend. Equal arguments make equal worlds.

    Every entry is selected: rounding can't change what is attended.
    """

    def __init__(
        self,
        impl: str,
        device: str,
        *,
        kv: str = "fp32",
        ratios: tuple[int, ...] = RATIOS,
        lanes: int = 5,
        tokens: int = 300,
        seed: int = 0,
        max_position: int | None = None,
    ) -> None:
        sizes = ((128, 64), 64) if kv == "fp8" else (SMALL, 32)
        self.cfg = dataclasses.replace(small_config(4, *sizes), compress_ratios=ratios, index_topk=80)
        if max_position is not None:
            self.cfg = dataclasses.replace(self.cfg, max_position=max_position)
        self.geom, self.device = small_geometry(drafts=True), torch.device(device)
        self.pool = pool_for(self.geom, lanes, tokens, seed)
        self.mirror = TableMirror(self.pool, self.device)
        if self.device.type == "cuda":
            self.device = self.mirror.tables.device  # with its index
        self.cache = DSV4Cache(
            self.cfg,
            self.geom,
            CacheSize(self.pool.num_pages + 1, self.pool.num_window_pages + 1, lanes + 1),
            format=kv,
            device=self.device,
        )
        self.backend = self.new_backend(impl)
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.layers = [DSV4Attention(self.cfg, ratio, impl=impl, dtype=torch.float32) for ratio in ratios]
        for layer in self.layers:
            layer.to(self.device)
        self.embedding = torch.randn((VOCAB, self.cfg.hidden_size), generator=generator).to(self.device)
        self.generator, self.max_tokens = generator, tokens

    def new_backend(self, impl: str, **changed: object) -> DSV4AttnBackend:
        arguments: dict[str, object] = dict(
            cfg=self.cfg, geom=self.geom, cache=self.cache, tables=self.mirror.tables, impl=impl
        )
        return DSV4AttnBackend(**(arguments | changed))  # type: ignore[arg-type]

    def new_draft_backend(self, impl: str, **options: object) -> DSV4DraftBackend:
        return DSV4DraftBackend(self.cfg, self.geom, self.cache, self.mirror.tables, impl, **options)  # type: ignore[arg-type]

    def model(self, ids: torch.Tensor, meta: AttnMetadata) -> tuple[torch.Tensor, ...]:
        """Hidden states, and each row's position."""
        x = self.embedding[ids]
        for index, layer in enumerate(self.layers):
            x = x + self.backend.attend(index, layer, x, meta)
        return x, meta.positions

    def runner(
        self, executor: str, mode: ForwardMode = ForwardMode.DECODE, width: int = 1, sizes: object = (1, 2, 4)
    ) -> StepGraphRunner:
        runner = StepGraphRunner(
            self.model,
            self.backend,
            mode=mode,
            width=width,
            buckets=BucketPolicy(sizes=sizes),  # type: ignore[arg-type]
            device=self.device,
            executor=executor,
        )
        runner.capture()
        return runner

    def open(self, tokens: torch.Tensor | None = None) -> Lane:
        """A new request with tokens of its own, or with these."""
        if tokens is None:
            tokens = torch.randint(VOCAB, (self.max_tokens,), generator=self.generator)
        return Lane(self.pool.open(), tokens)

    def batch(
        self, mode: ForwardMode, sizes: dict[Lane, int], accepts: dict[Lane, int] | None = None
    ) -> tuple[RawBatch, torch.Tensor]:
        """The next tokens of each request; those that are not accepted are others than its own."""
        slots, ids = [], []
        for lane, size in sizes.items():
            stop = lane.length + size
            self.pool.grow(lane.row, stop)
            slots.append(torch.from_numpy(self.pool.slots(lane.row, lane.length, stop).copy()).long())
            accepted = size if accepts is None else accepts[lane]
            own = lane.tokens[lane.length : stop]
            ids.append(torch.cat((own[:accepted], (own[accepted:] + 1) % VOCAB)))
        self.mirror.refresh()
        before = torch.tensor([lane.length for lane in sizes], dtype=torch.int64)
        count = torch.tensor(list(sizes.values()), dtype=torch.int64)
        verify = mode is ForwardMode.TARGET_VERIFY
        ragged = mode is ForwardMode.EXTEND or len(set(sizes.values())) > 1
        nothing = torch.zeros(0, dtype=torch.int64)
        batch = RawBatch(
            mode,
            torch.tensor([lane.row for lane in sizes], dtype=torch.int64).to(self.device),
            (before if verify else before + count).to(self.device),
            torch.cat([nothing, *slots]).to(self.device),
            extend_lens=count.to(self.device) if ragged else None,
            num_draft_tokens=max(sizes.values(), default=1) if verify or mode is ForwardMode.DRAFT_EXTEND else 0,
        )
        return batch, torch.cat([nothing, *ids]).to(self.device)

    def eager(self, batch: RawBatch, ids: torch.Tensor, padded_rows: int | None = None) -> torch.Tensor:
        """Hidden states of all rows; padding gets tokens that are not those of a runner's padding."""
        meta = self.backend.prepare(batch, padded_rows)
        padding = torch.full((meta.num_rows - len(ids),), 7, device=self.device)
        return self.model(torch.cat((ids, padding)), meta)[0]

    def commit(self, accepts: dict[Lane, int]) -> None:
        for lane, size in accepts.items():
            lane.length += size
            self.pool.trim_window(lane.row, lane.length - self.geom.window)

    def skip(self, sizes: dict[Lane, int]) -> None:
        """As `extend`, without computing anything: for what looks at metadata alone."""
        self.batch(ForwardMode.EXTEND, sizes)
        self.commit(sizes)

    def extend(self, sizes: dict[Lane, int]) -> torch.Tensor:
        """A prompt step: hidden states of its rows."""
        out = self.eager(*self.batch(ForwardMode.EXTEND, sizes))
        self.commit(sizes)
        return out

    def whole(self, lane: Lane) -> torch.Tensor:
        """Hidden states of all committed tokens of a request, as another one gets them at once."""
        other = self.open(lane.tokens)
        out = self.extend({other: lane.length})
        self.pool.close(other.row)
        return out

    def snapshot(self) -> dict[str, torch.Tensor]:
        """All pools as bytes, without what is reserved for padding."""
        found = {}
        for index, layer in enumerate(self.cache.layers):
            pools = {"window": layer.window, "compressed": layer.compressed, "index_keys": layer.index_keys}
            for name, pool in pools.items():
                if pool is not None:
                    found[f"{index}.{name}"] = pool.data.view(torch.uint8).clone()
            for name, state in (("state", layer.state), ("index_state", layer.index_state)):
                if state is not None:
                    found[f"{index}.{name}"] = state[self.geom.ring(layer.ratio) :].view(torch.uint8).clone()
        return found


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """The same to float32 rounding."""
    return found.shape == expected.shape and bool(((found - expected).abs() <= 2e-5 * expected.abs().max()).all())
