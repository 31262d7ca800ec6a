"""Builds the metadata of a step with the builder under test: its own, that of its drafts, that of idle steps."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_backend.plans import DecodePlans, PrefillPlan
from dsv4_backend.replay.batch_rows import CacheSizes
from dsv4_backend.replay.builds import Build, BuildMode, builds_of, drafting
from dsv4_backend.replay.image import RATIOS, PlanImage
from dsv4_backend.replay.metadata_image import MetadataImage, StepImages
from dsv4_backend.replay.planning import StepPlanner, clock, plan_image
from dsv4_backend.replay.step import Step
from dsv4_backend.tables import RequestTables

POISON = 0x5A5A5A5A
"""Fills buffers between builds: whatever a build leaves out is then wrong, not yesterday's."""

_CONFIG = DSV4Config.v4_flash()


@dataclass(frozen=True)
class BuildCost:
    """What one build cost.

    Args:
        mode: its kind.
        rows: rows of all its steps, padding included.
        microseconds: host time of the call; on a GPU up to its end there, a synchronisation included.
    """

    mode: BuildMode
    rows: int
    microseconds: float


@dataclass(frozen=True)
class BuiltStep:
    """All that was made for a step, on the host, and what it cost.

    Args:
        images: the plan that came with the metadata, and the metadata.
        costs: of each build, that of the step's own mode first.
        plan_us: host time of the planner without metadata, in microseconds.
        plan_differs: where its plan is not the one that came with the metadata; None: nowhere.
        compress_rows: by ratio, rows that complete a group.
    """

    images: StepImages
    costs: list[BuildCost]
    plan_us: float
    plan_differs: str | None
    compress_rows: dict[int, int]


def cache_sizes(geom: CacheGeometry) -> CacheSizes:
    """The numbers that the ledger goes by."""
    return CacheSizes(
        page_size=geom.page_size,
        window_page_size=geom.swa_page_size,
        window=geom.window,
        c4_ring=geom.c4_ring,
        c128_ring=geom.c128_ring,
        index_topk=_CONFIG.index_topk,
    )


class StepBuilder:
    """Builds steps for a model of both ratios and for a draft model with a window only.

    Args:
        geom: cache geometry.
        impl: implementation of the metadata and of the planner.
        tables: where the tokens are, and where all is built. On a GPU the batches lie there, too.
        max_rows: most rows of a step, padding included.
    """

    def __init__(self, geom: CacheGeometry, impl: str, tables: RequestTables, max_rows: int) -> None:
        self._planner, self._device = StepPlanner(geom, impl, tables), tables.device

        def builder(ratios: tuple[int, ...]) -> MetadataBuilder:
            longest = tables.max_seq_len
            return MetadataBuilder(
                _CONFIG, geom, tables, max_rows=max_rows, max_seq_len=longest, ratios=ratios, impl=impl
            )

        self._target, self._draft = builder(RATIOS), builder(())
        self._addresses: dict[tuple[object, ...], dict[str, int]] = {}
        self._last: list[AttnMetadata] = []

    def build(self, step: Step) -> BuiltStep:
        """Builds all that belongs to a step, then reads it: one build must not spoil another.

        Raises:
            ValueError: a batch was refused, or flagged on the device.
        """
        for meta in self._last:
            for _, tensor in meta.tensors():
                tensor.fill_(POISON & 0xFF if tensor.dtype is torch.uint8 else POISON)
        costs, built = [], []
        for build in builds_of(step):
            metas, microseconds = self._run(build, step)
            costs.append(BuildCost(build.mode, build.num_rows * len(metas), microseconds))
            built += [(build, place, meta) for place, meta in enumerate(metas)]
        self._last = [meta for *_, meta in built]
        self._draft.check()
        images = [
            MetadataImage(build, place, _arrays(meta), self._moved(build, place, meta, step))
            for build, place, meta in built
        ]
        plans = self._last[0].plans
        assert isinstance(plans, PrefillPlan | DecodePlans)
        image = plan_image(plans)
        alone, plan_us = self._planner.plan(step, images[0].build.padding_requests)
        closed = {ratio: int(np.count_nonzero(_ends(step) % ratio == 0)) for ratio in RATIOS}
        return BuiltStep(StepImages(image, images), costs, plan_us, _difference(image, plan_image(alone)), closed)

    def _run(self, build: Build, step: Step) -> tuple[list[AttnMetadata], float]:
        batch = raw_batch(build, step, self._device)
        padded = build.num_rows if build.padded else None
        start = clock(self._device)
        if build.mode is BuildMode.DRAFT_DECODE:
            window = "frozen" if build.frozen else "growing"
            metas = self._draft.build_draft_steps(batch, padded, draft_window=window)
        else:
            metas = [(self._draft if build.mode.drafts else self._target).build(batch, padded)]
        return metas, (clock(self._device) - start) * 1e6

    def _moved(self, build: Build, place: int, meta: AttnMetadata, step: Step) -> tuple[str, ...]:
        """Tensors of `meta` that lie elsewhere than in the last build of the same bucket."""
        # EXTEND may keep tables once a request: then these depend on the requests, too.
        requests = len(step.before) + build.padding_requests if build.mode is BuildMode.EXTEND else 0
        key = (build.mode, build.num_rows, build.padded, build.chain, build.frozen, place, requests)
        now = {name: tensor.data_ptr() for name, tensor in meta.tensors()}
        before = self._addresses.setdefault(key, now)
        return tuple(name for name in now | before if now.get(name) != before.get(name))


def raw_batch(build: Build, step: Step, device: torch.device) -> RawBatch:
    """The batch that a build of a step is given, on `device`."""
    mode, dtype = ForwardMode(build.mode.value), torch.int32 if step.index % 2 else torch.int64

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

    req, slots = step.req_pool_indices, step.out_cache_loc
    if build.mode is BuildMode.IDLE:
        # What an earlier batch left behind.
        return RawBatch(mode, tensor(req[:4]), tensor(step.after[:4]), tensor(slots[:4]))
    if build.mode is BuildMode.DRAFT_DECODE:
        first = np.cumsum(step.extend_lens) - step.extend_lens
        column = np.minimum(np.arange(build.chain), step.extend_lens[:, None] - 1)
        lanes = np.where(drafting(step, build.chain), req, 0)
        chains = slots[(first[:, None] + column).ravel()]
        return RawBatch(mode, tensor(lanes), tensor(step.before), tensor(chains), num_steps=build.chain)
    lengths, extend = step.seq_lens if build.mode is not BuildMode.DRAFT_EXTEND else step.after, step.extend_lens
    if build.padding_requests:
        # Their slots are what an earlier batch left behind.
        rows = build.num_rows - step.total_rows
        each = np.full(build.padding_requests, rows // build.padding_requests)
        req, lengths = np.append(req, each * 0), np.append(lengths, each * 0 + 1)
        extend, slots = np.append(extend, each), np.append(slots, np.resize(slots, rows))
    return RawBatch(
        mode,
        tensor(req),
        tensor(lengths),
        tensor(slots),
        extend_lens=tensor(extend) if build.ragged else None,
        num_draft_tokens=step.num_draft_tokens,
    )


def _arrays(meta: AttnMetadata) -> dict[str, np.ndarray]:
    """The tensors of `meta` by name, without its plans; on a CPU they share its memory."""
    named = {field.name: getattr(meta, field.name) for field in fields(meta)}
    return {name: value.cpu().numpy() for name, value in named.items() if isinstance(value, torch.Tensor)}


def _ends(step: Step) -> np.ndarray:
    """int64 [T]: length of each row's request once the row is done."""
    last = np.cumsum(step.extend_lens)
    return np.arange(step.total_rows) + 1 + np.repeat(step.after - last, step.extend_lens)


def _difference(ours: PlanImage, alone: PlanImage) -> str | None:
    """What differs between a plan of the builder and one of the planner, which knows no padding of decode plans."""
    if (ours.header is None) != (alone.header is None):
        return "another kind of plan"
    if ours.header is not None and alone.header is not None and (ours.header != alone.header).any():
        return f"header {ours.header.tolist()}, not {alone.header.tolist()}"
    for ratio in RATIOS:
        if ours.header is None:
            pairs = {"rows": (ours.decode[ratio][: len(alone.decode[ratio])], alone.decode[ratio])}
        else:
            one, other = ours.lists[ratio], alone.lists[ratio]
            pairs = {"compress": (one.compress, other.compress), "write": (one.write, other.write)}
        for name, (one_rows, other_rows) in pairs.items():
            if not np.array_equal(one_rows, other_rows):
                return f"c{ratio} {name}"
    return None
