"""Steps to build metadata for, the cache they run on, and a builder whose buffers show every write that is not due."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import dsv4_backend as d4
from backends import POISON
from dsv4_backend import metadata_buffers
from dsv4_backend.metadata_buffers import BucketBuffers, BucketKey
from strategies import GARBAGE_SLOT, Pool, lay_out

GEOM = d4.CacheGeometry.for_drafts(4)
MODES = list(d4.ForwardMode)
PLAIN = ((torch.int64, "contiguous"),) * 4
"""Dtype and layout of req_pool_indices, seq_lens, out_cache_loc and extend_lens."""

NAMES = ("req_pool_indices", "seq_lens", "out_cache_loc", "extend_lens")
RED_ZONE = 64
POISON_WORD = 0x5A5A5A5A


@dataclass(frozen=True)
class Step:
    """A batch as lists, and how it is built."""

    mode: d4.ForwardMode
    reqs: list[int]
    seqs: list[int]
    slots: list[int]
    extends: list[int] | None = None
    drafts: int = 0
    num_steps: int = 0
    padded: int | None = None
    grows: bool = True
    forms: tuple[tuple[torch.dtype, str], ...] = PLAIN

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        columns = (self.reqs, self.seqs, self.slots, self.extends)
        return {
            name: lay_out(values, *form, device)
            for name, values, form in zip(NAMES, columns, self.forms, strict=True)
            if values is not None
        }

    def batch(self, tensors: Mapping[str, torch.Tensor]) -> d4.RawBatch:
        return d4.RawBatch(self.mode, **tensors, num_draft_tokens=self.drafts, num_steps=self.num_steps)

    def build(
        self, builder: d4.MetadataBuilder, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> list[d4.AttnMetadata]:
        """The metadata of each step that runs a forward: one, but for DRAFT_DECODE."""
        batch = self.batch(self.tensors(str(builder.device)) if tensors is None else tensors)
        if self.mode is d4.ForwardMode.DRAFT_DECODE:
            return builder.build_draft_steps(batch, self.padded, "growing" if self.grows else "frozen")
        return [builder.build(batch, self.padded)]


class GuardedBuilder(d4.MetadataBuilder):
    """Its buffers begin full of a value that nobody writes, and have a red zone on each side."""

    def _bucket(self, key: BucketKey) -> BucketBuffers:
        known = key in self._buckets
        bucket = super()._bucket(key)
        if not known:
            bucket.tensors.update({name: _guarded(tensor) for name, tensor in bucket.tensors.items()})
        return bucket

    def poison(self) -> None:
        for tensors in self.buffers().values():
            for tensor in tensors.values():
                _fill(tensor)

    def check_guards(self) -> None:
        for key, tensors in self.buffers().items():
            for name, tensor in tensors.items():
                zone = _filled(RED_ZONE, tensor)
                for place in (tensor._base[:RED_ZONE], tensor._base[-RED_ZONE:]):
                    assert torch.equal(place, zone), f"{name} of {key}: its red zone was written"


class UncheckedBuilder(GuardedBuilder):
    """Takes values that lie on a CPU for values on a device, which no host check sees."""

    def _check(self, batch: d4.RawBatch, grows: bool = False) -> None:
        pass


@dataclass(frozen=True)
class Setting:
    """A cache, and what a builder is told about it."""

    pool: Pool
    geom: d4.CacheGeometry = GEOM
    topk: int = 512
    max_seq_len: int | None = None
    ratios: tuple[int, ...] = (4, 128)
    once_a_request: bool = False

    @property
    def longest(self) -> int:
        columns = self.pool.req_to_token.shape[1]
        return min(columns, self.max_seq_len or columns)

    def __repr__(self) -> str:
        rows, columns = self.pool.req_to_token.shape
        return (
            f"Setting({rows} requests of {columns} columns, {self.geom}, topk={self.topk}, "
            f"max_seq_len={self.max_seq_len}, ratios={self.ratios}, once_a_request={self.once_a_request})"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What Hypothesis shows instead of every slot."""
        printer.text(repr(self))

    def tables(self, device: str) -> d4.RequestTables:
        """The pool's tables; what lies around them must not be read."""
        pool = self.pool
        rows, columns = pool.req_to_token.shape
        shape = (pool.skipped_rows + rows + 1, columns + pool.spare_columns)
        base = torch.full(shape, GARBAGE_SLOT, dtype=torch.int32, device=device)
        first = pool.spare_columns // 2
        table = base[pool.skipped_rows : pool.skipped_rows + rows, first : first + columns]
        table.copy_(torch.from_numpy(pool.req_to_token))
        window_slots = torch.full((len(pool.full_to_swa) + 6,), GARBAGE_SLOT, dtype=torch.int64, device=device)[3:-3]
        window_slots.copy_(torch.from_numpy(pool.full_to_swa))
        return d4.RequestTables(table, window_slots)

    def builder(
        self,
        impl: str,
        device: str,
        kind: type[GuardedBuilder] = GuardedBuilder,
        tables: d4.RequestTables | None = None,
        **options: object,
    ) -> GuardedBuilder:
        arguments = {
            "max_rows": 1 << 17,
            "max_seq_len": self.max_seq_len or self.pool.req_to_token.shape[1],
            "ratios": self.ratios,
            "impl": impl,
        }
        cfg = dataclasses.replace(d4.DSV4Config.v4_flash(), window=self.geom.window, index_topk=self.topk)
        return kind(cfg, self.geom, tables or self.tables(device), **(arguments | options))

    @contextlib.contextmanager
    def limits(self) -> Iterator[None]:
        """While this lasts, the first build of a bucket keeps tables once a request if the setting says so."""
        most = 0 if self.once_a_request else 1 << 60
        with mock.patch.object(metadata_buffers, "MAX_TABLE_BYTES", most):
            yield


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory that a view was taken from."""
    return tensor if tensor._base is None else tensor._base


def _guarded(tensor: torch.Tensor) -> torch.Tensor:
    base = _filled(tensor.numel() + 2 * RED_ZONE, tensor)
    return base[RED_ZONE : RED_ZONE + tensor.numel()].view(tensor.shape)


def _filled(size: int, like: torch.Tensor) -> torch.Tensor:
    return _fill(torch.empty(size, dtype=like.dtype, device=like.device))


def _fill(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(POISON if tensor.dtype == torch.uint8 else POISON_WORD)
