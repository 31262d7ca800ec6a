"""The metadata suite of `dsv4 capture-test`: builds of every mode replayed over poisoned buffers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial

import torch

from dsv4_backend.batch import ForwardMode
from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import RATIOS
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_bench.capture_case import CaptureCase, CaptureOptions, Difference
from dsv4_bench.capture_inputs import DRAFTS, GEOMETRY, MODES, Mode, StaticBatch, StaticTables

BUCKETS = (1, 2, 4, 16, 64)
REPLAYS = 6
POISON = 0xAB
SHORT = 2048
LONG = 70_000
"""Tokens of a request whose page table takes more than one read of the kernel."""
LARGEST = 1_048_576
"""Capacity of a builder for long requests: there, EXTEND keeps tables once a request from 683 rows on."""

# Two kernels of a build, the second of which reads what the first has stored.
RACES = {"ragged-verify": 96, "extend": 64}


def cases(options: CaptureOptions) -> list[CaptureCase]:
    found: list[CaptureCase] = []

    def add(name: str, mode: Mode, size: int, ratios: tuple[int, ...] = RATIOS, long: bool = False) -> None:
        found.append(CaptureCase(name, partial(_walk, options, mode, size, ratios, long)))

    for name, mode in MODES.items():
        for size in BUCKETS:
            for ratios in (RATIOS, (), (4,), (128,)) if size == 4 else (RATIOS,):
                add(f"{name}-{size}-ratios-{'-'.join(map(str, ratios)) or 'none'}", mode, size, ratios)
        add(f"{name}-long", mode, 32 if mode.mode is ForwardMode.EXTEND else 4, long=True)
    for name, size in RACES.items():
        found.append(CaptureCase(f"race-{name}-{size}", partial(_race, options, MODES[name], size)))
    return found


class _Replayed:
    """A build at fixed addresses, replayed, and a builder that builds the same with the reference."""

    def __init__(
        self, options: CaptureOptions, mode: Mode, size: int, ratios: tuple[int, ...], long: bool, rng: random.Random
    ) -> None:
        self.tables = StaticTables(size, LONG if long else SHORT, options.device)
        self.batch = StaticBatch(mode, size, self.tables, options.device, rng)
        # A bucket of two has more rows than its batch.
        self._padded = self.batch.step_rows + (DRAFTS if size == 2 else 0)
        self._mode = mode
        self._builder, self._reference = (
            MetadataBuilder(
                DSV4Config.v4_flash(),
                GEOMETRY,
                self.tables.tables,
                max_rows=self._padded,
                max_seq_len=LARGEST if long else SHORT,
                ratios=ratios,
                impl=impl,
            )
            for impl in (options.impl, "torch")
        )
        self.load(0, rng)  # as engines capture: padding only
        self._metas = self._build(self._builder)
        self._addresses = self._places()
        self.replay = options.record(lambda: self._build(self._builder))

    def load(self, live: int, rng: random.Random) -> None:
        """New contents of tables, lengths, ids and slots."""
        self.tables.shuffle(rng)
        self.batch.draw(live, rng)

    def poison(self) -> None:
        """Fills every buffer of the builder with what no build writes."""
        for tensors in self._builder.buffers().values():
            for tensor in tensors.values():
                tensor.view(torch.uint8).fill_(POISON)

    def expected(self) -> list[AttnMetadata]:
        """What the reference makes of the same memory, valid until it is asked again."""
        return self._build(self._reference)

    def expect(self, expected: Iterable[AttnMetadata], where: str) -> None:
        """Raises `Difference` for metadata, addresses or flags that are not as they should be."""
        for builder in (self._builder, self._reference):
            builder.check()
        for step, (ours, theirs) in enumerate(zip(self._metas, expected, strict=True)):
            found = ours.difference(theirs)
            if found is not None:
                raise Difference(f"{where}: step {step}: {found} (expected: the reference)")
        if self._places() != self._addresses:
            raise Difference(f"{where}: buffers are not where they were captured")

    def _build(self, builder: MetadataBuilder) -> list[AttnMetadata]:
        if self._mode.draft_window:
            return builder.build_draft_steps(self.batch.raw, self._padded, self._mode.draft_window)
        return [builder.build(self.batch.raw, self._padded)]

    def _places(self) -> tuple[object, ...]:
        return self._builder.fingerprint(), self._builder.draft_fingerprint()


def _walk(options: CaptureOptions, mode: Mode, size: int, ratios: tuple[int, ...], long: bool, seed: int) -> int:
    """A full bucket, one request in it, none, then any number; everything else changes with each replay, too."""
    rng = random.Random(seed)
    replayed = _Replayed(options, mode, size, ratios, long, rng)
    for i in range(REPLAYS):
        live = (size, 1, 0, *[rng.randint(0, size) for _ in range(REPLAYS)])[i]
        replayed.load(live, rng)
        replayed.poison()
        replayed.replay()
        replayed.expect(replayed.expected(), f"replay {i}, {live} of {size} requests live")
    return REPLAYS


def _race(options: CaptureOptions, mode: Mode, size: int, seed: int) -> int:
    """The same batch again and again: the same metadata every time."""
    repeats = 300 if options.device.type == "cuda" else 3
    rng = random.Random(seed)
    replayed = _Replayed(options, mode, size, RATIOS, False, rng)
    replayed.load(size - 1, rng)
    expected = replayed.expected()
    for i in range(repeats):
        replayed.poison()
        replayed.replay()
        replayed.expect(expected, f"repeat {i} of {repeats}")
    return repeats
