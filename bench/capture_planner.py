"""The planner's suite of `dsv4 capture-test`: plans replayed over poisoned buffers, against the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import torch

from dsv4_backend.dispatch import resolve_impl
from dsv4_backend.geometry import RATIOS, CacheGeometry
from dsv4_backend.planner import plan_decode, plan_prefill
from dsv4_backend.plans import DecodePlans, PrefillPlan
from dsv4_backend.tables import RequestTables
from dsv4_bench.capture_case import CaptureCase, CaptureOptions, Difference

GEOMETRY = CacheGeometry.for_drafts(4)
MAX_LEN = 2048
REPLAYS = 6
POISON = 0xAB
BUCKETS = (1, 2, 4, 8, 16, 64)

# Ragged batches which a planner that lets one warp wipe another's minimum takes for uniform ones.
RACES = {"race-72x4-24x3": [4] * 72 + [3] * 24, "race-104x3-24x2": [3] * 104 + [2] * 24}


@dataclass(frozen=True)
class Mode:
    """How the rows of a request are drawn: between `least` and `most`; `decode`: one, planned as decode."""

    least: int
    most: int
    decode: bool = False


MODES = {
    "verify": Mode(4, 4),
    "ragged-verify": Mode(1, 4),
    "some-empty": Mode(0, 3),
    "prefill": Mode(1, 300),
    "decode": Mode(1, 1, decode=True),
}


def cases(options: CaptureOptions) -> list[CaptureCase]:
    found = [
        CaptureCase(f"{name}-{size}-ratios{''.join(f'-{ratio}' for ratio in ratios)}", check)
        for name, mode in MODES.items()
        for size in BUCKETS
        for ratios in ([RATIOS] if size != 4 else [RATIOS, (4,), (128,)])
        for check in [partial(_walk, options, mode, size, ratios)]
    ]
    found += [CaptureCase(name, partial(_race, options, extends)) for name, extends in RACES.items()]
    return found


class _Static:
    """Lengths and ids at fixed addresses, tables of shuffled slots, and the plan that is replayed."""

    def __init__(
        self, options: CaptureOptions, size: int, num_rows: int, ratios: tuple[int, ...], decode: bool
    ) -> None:
        device = self.device = options.device
        generator = torch.Generator().manual_seed(size)
        req_to_token = torch.randperm((size + 1) * MAX_LEN, generator=generator).view(size + 1, MAX_LEN) + 256
        req_to_token[0] = 0
        self.tables = RequestTables(
            req_to_token.to(torch.int32).to(device),
            torch.arange((size + 1) * MAX_LEN + 257, dtype=torch.int64, device=device),
        )
        self.seq_lens, self.extends, self.ids = (torch.ones(size, dtype=torch.int64, device=device) for _ in range(3))
        self._num_rows, self._ratios, self._decode = num_rows, ratios, decode
        self.out: PrefillPlan | DecodePlans
        if decode:
            self.out = DecodePlans.empty(size, ratios, device)
        else:
            self.out = PrefillPlan.empty(num_rows, ratios, device)
        self._impl = resolve_impl("auto", device)
        self.replay = options.record(lambda: self.plan(self._impl, self.out))

    def plan(self, impl: str, out: PrefillPlan | DecodePlans | None) -> PrefillPlan | DecodePlans:
        """Plans what the fixed tensors hold, by `impl`."""
        if self._decode:
            assert not isinstance(out, PrefillPlan)
            return plan_decode(self.seq_lens, self.ids, self.tables, GEOMETRY, self._ratios, impl, out)
        assert not isinstance(out, DecodePlans)
        return plan_prefill(
            self.seq_lens, self.extends, self.ids, self.tables, GEOMETRY, self._num_rows, self._ratios, impl, out
        )

    def load(self, prefixes: list[int], extends: list[int], ids: list[int]) -> None:
        """Puts a batch where the graph reads it, and poison where it writes."""
        for target, values in (
            (self.seq_lens, [p + e for p, e in zip(prefixes, extends, strict=True)]),
            (self.extends, extends),
            (self.ids, ids),
        ):
            target.copy_(torch.tensor(values, dtype=torch.int64))
        for _, tensor in self.out.tensors():
            tensor.fill_(POISON)

    def expect_equal(self, where: str) -> None:
        """Compares what was replayed with the reference, byte by byte."""
        expected = self.plan("torch", None)
        self.out.check()
        for (name, got), (_, wanted) in zip(self.out.tensors(), expected.tensors(), strict=True):
            if not torch.equal(got, wanted):
                at = (got != wanted).nonzero()[0].tolist()
                raise Difference(f"{where}: {name} differs from the reference, first at {at}")


def _walk(options: CaptureOptions, mode: Mode, size: int, ratios: tuple[int, ...], seed: int) -> int:
    """Live requests from none to all of the bucket, the others padding; lengths short, at borders, and long."""
    rng = random.Random(seed)
    static = _Static(options, size, min(size * mode.most + 3, 4096), ratios, mode.decode)
    for i in range(REPLAYS):
        live = (size, 0, *[rng.randint(0, size) for _ in range(REPLAYS)])[i]
        extends = [rng.randint(mode.least, mode.most) for _ in range(live)]
        prefixes = [_prefix(rng, MAX_LEN - mode.most) for _ in range(live)]
        while not mode.decode and sum(extends) > 4096:
            extends[extends.index(max(extends))] = mode.least
        padding = size - live
        ids = rng.sample(range(1, size + 1), live)
        # A padding request of a decode batch has one token, of any other batch no row.
        static.load(prefixes + [0] * padding, extends + [int(mode.decode)] * padding, ids + [0] * padding)
        static.replay()
        static.expect_equal(f"replay {i}, {live} of {size} requests live")
    return REPLAYS


def _prefix(rng: random.Random, largest: int) -> int:
    return rng.choice(
        (rng.randint(0, 9), rng.choice((127, 128, 255, 256)) - rng.randint(0, 4), rng.randint(0, largest))
    )


def _race(options: CaptureOptions, extends: list[int], seed: int) -> int:
    """The same ragged batch again and again: the same plan, to the byte, every time."""
    repeats = 300 if options.device.type == "cuda" else 3
    size, rng = len(extends), random.Random(seed)
    static = _Static(options, size, 4096, RATIOS, decode=False)
    prefixes, ids = [1000 + rng.randint(0, 99) for _ in extends], rng.sample(range(1, size + 1), size)
    expected: PrefillPlan | DecodePlans | None = None
    for i in range(repeats):
        static.load(prefixes, extends, ids)
        static.replay()
        expected = expected or static.plan("torch", None)
        for (name, got), (_, wanted) in zip(static.out.tensors(), expected.tensors(), strict=True):
            if not torch.equal(got, wanted):
                raise Difference(f"repeat {i} of {repeats}: {name} differs from the reference")
    return repeats
