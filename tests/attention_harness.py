"""Attention to check: pools in which all that no list names is NaN, and results computed row by row in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dsv4_backend import EntryLayout, EntryPool, store_entries
from dsv4_backend.attention import sparse_attention
from dsv4_backend.reference.kv_store import load_entries

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
POISON = 0xFF  # NaN in every format
FORMATS = ("fp32", "bf16", "fp8")
QUERY_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
# Entries of a page: of the window and of compressed entries.
PAGES = (8, 2)


def rope_dim(head_dim: int) -> int:
    return 64 if head_dim > 64 else head_dim // 4


@dataclass
class Lists:
    """What one index list says, as plain numbers: rows of slots, and how many of each row count."""

    slots: list[list[int]]
    lengths: list[int]

    def live(self, row: int, num_slots: int) -> list[int]:
        """Slots that count in a row."""
        counted = self.slots[row][: max(self.lengths[row], 0)]
        return [slot for slot in counted if 0 <= slot < num_slots]

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices with more columns in memory than in the list, and lengths."""
        rows, columns = len(self.slots), len(self.slots[0]) if self.slots else 0
        base = torch.full((rows, columns + 3), 1, dtype=torch.int32, device=device)
        indices = base[:, 2 : 2 + columns]
        if columns:
            indices.copy_(torch.tensor(self.slots, dtype=torch.int32))
        return indices, torch.tensor(self.lengths, dtype=torch.int32, device=device)


@dataclass
class Case:
    """A call: everything it gets, and `options` for what may be left out."""

    q: torch.Tensor
    window: EntryPool
    window_list: Lists
    compressed: EntryPool | None = None
    compressed_list: Lists | None = None
    options: dict[str, object] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.q.device)

    def arguments(self) -> tuple[object, ...]:
        window = (self.window, *self.window_list.tensors(self.device))
        if self.compressed_list is None:
            return self.q, *window
        return self.q, *window, self.compressed, *self.compressed_list.tensors(self.device)

    def run(self, impl: str, **options: object) -> torch.Tensor:
        return sparse_attention(*self.arguments(), impl=impl, **{**self.options, **options})  # type: ignore[arg-type]

    def check(self, impl: str, **options: object) -> torch.Tensor:
        """The result, once it and its logarithms are known to be right."""
        rows, heads, _ = self.q.shape
        options = {**self.options, **options}
        lse = torch.full((rows, heads), torch.nan, device=self.device)
        found = self.run(impl, lse=lse, **options)
        expected, log_sum = expected_results(self, **options)
        check_close(found, expected, self.window.layout.format)
        assert torch.equal(lse == -torch.inf, log_sum == -torch.inf)
        assert torch.allclose(lse.double(), log_sum, rtol=1e-5, atol=1e-5)
        return found

    def rows(self, order: list[int]) -> Case:
        """The same case with other rows: their numbers in this one."""
        options = dict(self.options)
        if options.get("positions") is not None:
            options["positions"] = options["positions"][order]  # type: ignore[index]
        lists = [
            part and Lists([part.slots[row] for row in order], [part.lengths[row] for row in order])
            for part in (self.window_list, self.compressed_list)
        ]
        assert lists[0] is not None
        return Case(self.q[order], self.window, lists[0], self.compressed, lists[1], options)


def check_close(found: torch.Tensor, expected: torch.Tensor, kv: str) -> None:
    """Float32 by element; where weights are rounded to bfloat16, by row and head."""
    assert found.isfinite().all()
    error = (found.double() - expected).abs()
    if kv == "fp32" and found.dtype == torch.float32:
        # Sums of hundreds of terms, and a GPU's own power of two.
        limit = 3e-5 * expected.abs().clamp(min=1)
    else:
        error, limit = error.norm(dim=-1), 5e-3 * expected.norm(dim=-1)
    bad = (error > limit).nonzero()
    assert not len(bad), f"{len(bad)} differences, the first at {bad[0].tolist()}: {error[tuple(bad[0])]}"


def expected_results(
    case: Case,
    *,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    positions: torch.Tensor | None = None,
    rope: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [T, H, D] and [T, H], row by row from the list's live slots; weights are not rounded."""
    q = case.q.double() if case.window.layout.format == "fp32" else case.q.bfloat16().double()
    rows, heads, dim = q.shape
    results, sums = torch.zeros_like(q), q.new_full((rows, heads), -torch.inf)
    for row in range(rows):
        parts = []
        for pool, part in ((case.window, case.window_list), (case.compressed, case.compressed_list)):
            if pool is not None and part is not None:
                slots = torch.tensor(part.live(row, pool.num_slots), dtype=torch.int64, device=q.device)
                parts.append(load_entries(pool, slots).double())
        entries = torch.cat(parts)
        if not len(entries):
            continue
        logits = q[row] @ entries.T * (dim**-0.5 if scale is None else scale)
        sums[row] = logits.logsumexp(dim=1)
        if sink is not None:
            logits = torch.cat((logits, sink.double()[:, None]), dim=1)
        # A sink of plus infinity takes everything; softmax gives NaN for it.
        weights = logits.softmax(dim=1)[:, : len(entries)].nan_to_num(0.0)
        results[row] = weights @ entries
    if rope is not None:
        assert positions is not None
        results = turn(results, -1, positions, rope)
    return results, sums


def turn(values: torch.Tensor, sign: int, positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """float64 [T, H, D] with its last channels turned by the angles of positions (1) or back (-1)."""
    split = values.shape[-1] - rope.shape[1]
    angles = rope.double().cpu().unflatten(1, (-1, 2))
    table = torch.complex(angles[..., 0], sign * angles[..., 1]).to(values.device)[positions.long()]
    pairs = torch.view_as_complex(values[..., split:].double().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * table[:, None]).flatten(-2)
    return torch.cat((values[..., :split].double(), turned), dim=-1)


def random_list(rows: int, columns: int, num_slots: int, generator: torch.Generator, wild: float = 0.1) -> Lists:
    """Slots with repetitions, a share of them out of range on either side; lengths of 0 to more than all columns."""
    slots = torch.randint(1, num_slots, (rows, columns), generator=generator)
    outside = torch.tensor([-1, -2, INT_MIN, num_slots, num_slots + 1, INT_MAX])
    other = outside[torch.randint(0, len(outside), (rows, columns), generator=generator)]
    slots = torch.where(torch.rand((rows, columns), generator=generator) < wild, other, slots)
    lengths = torch.randint(0, columns + 3, (rows,), generator=generator)
    return Lists(slots.tolist(), lengths.tolist())


def filled_pool(
    layout: EntryLayout,
    num_pages: int,
    named: list[int],
    generator: torch.Generator,
    device: str,
    first_channel: float | None = None,
) -> EntryPool:
    """A pool with random entries in the slots of `named`, and NaN everywhere else."""
    pool = EntryPool.empty(layout, num_pages, device)
    pool.data.view(torch.uint8).fill_(POISON)
    slots = torch.tensor(sorted(set(named)), dtype=torch.int64)
    values = torch.randn((len(slots), layout.head_dim), generator=generator)
    if first_channel is not None:
        values[:, 0] = first_channel
    store_entries(values.to(device), slots.to(device), pool, impl="torch")
    return pool


def make_case(
    kv: str,
    device: str,
    *,
    head_dim: int = 64,
    heads: int = 3,
    window: Lists | tuple[int, int] = (3, 20),
    compressed: Lists | tuple[int, int] | None = (3, 45),
    dtype: torch.dtype | None = None,
    wild: float = 0.1,
    seed: int = 0,
    rope: int | None = None,
    first_channel: float | None = None,
) -> Case:
    """A case of given lists, or of random ones with so many rows and columns; format fp8 has at least 128 channels."""
    generator = torch.Generator().manual_seed(seed)
    head_dim = max(head_dim, 128) if kv == "fp8" else head_dim
    turning = rope_dim(head_dim) if rope is None else rope
    lists, pools = [], []
    for part, page, num_pages in zip((window, compressed), PAGES, (12, 40), strict=True):
        if part is None:
            lists.append(None)
            pools.append(None)
            continue
        num_slots = page * num_pages
        if isinstance(part, tuple):
            part = random_list(*part, num_slots, generator, wild)
        named = [slot for row in range(len(part.slots)) for slot in part.live(row, num_slots)]
        layout = EntryLayout(kv, head_dim, turning, page)
        lists.append(part)
        pools.append(filled_pool(layout, num_pages, named, generator, device, first_channel))
    rows = len(lists[0].slots)
    q = 3 * torch.randn((rows, heads, head_dim), generator=generator)
    return Case(q.to(device, dtype or QUERY_DTYPES[kv]), pools[0], lists[0], pools[1], lists[1])


def add_sink_and_rope(case: Case, seed: int = 1, positions: int = 50) -> Case:
    """The case with random sinks and an inverse rope by random positions."""
    generator = torch.Generator().manual_seed(seed)
    rows, heads, _ = case.q.shape
    angle = torch.rand((positions, case.window.layout.rope_dim // 2), generator=generator).double() * 6
    table = torch.stack((angle.cos(), angle.sin()), dim=-1).float().flatten(1)
    case.options = dict(
        sink=torch.randn(heads, generator=generator).to(case.device),
        positions=torch.randint(0, positions, (rows,), generator=generator).to(case.device),
        rope=table.to(case.device),
    )
    return case
