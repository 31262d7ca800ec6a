"""What attention refuses, before anything is written."""

from __future__ import annotations

import pytest
import torch

from dsv4_backend import EntryLayout, EntryPool
from dsv4_backend.attention import sparse_attention

ROWS, HEADS, DIM, ROPE = 3, 2, 64, 16


def pool(kv: str = "fp32", dim: int = DIM, rope: int = ROPE, page: int = 4, indexer: bool = False) -> EntryPool:
    return EntryPool.empty(EntryLayout(kv, dim, rope, page, indexer=indexer), 3)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def arguments() -> dict[str, object]:
    return dict(
        q=torch.ones(ROWS, HEADS, DIM),
        window=pool(),
        window_indices=ints(ROWS, 4),
        window_lengths=ints(ROWS),
        compressed=pool(page=2),
        compressed_indices=ints(ROWS, 5),
        compressed_lengths=ints(ROWS),
        sink=torch.zeros(HEADS),
        positions=ints(ROWS),
        rope=torch.ones(7, ROPE),
        lse=torch.full((ROWS, HEADS), 9.0),
        out=torch.full((ROWS, HEADS, DIM), 9.0),
    )


REFUSALS: dict[str, tuple[dict[str, object], str]] = {
    "window": (dict(window=None), "window: expected a EntryPool, got NoneType"),
    "indexer keys": (dict(window=pool(indexer=True)), "window: expected a pool of window or compressed entries"),
    "few channels": (dict(window=pool(dim=8, rope=4)), "window: expected a head_dim of 16 to 512, got 8"),
    "many channels": (dict(window=pool(dim=1024)), "window: expected a head_dim of 16 to 512, got 1024"),
    "rope dim": (
        dict(window=pool("fp8", dim=256, rope=192)),
        "window: expected a rope_dim that is a power of two in format fp8, got 192",
    ),
    "empty pool": (
        dict(window=EntryPool.empty(EntryLayout("fp32", DIM, ROPE, 4), 0)),
        "window: expected at least the reserved page",
    ),
    "q dtype": (dict(q=torch.ones(ROWS, HEADS, DIM).half()), "q: expected dtype float32 or bfloat16, got float16"),
    "q dimensions": (dict(q=torch.ones(ROWS, DIM)), r"q: expected 3 dimensions, got shape \[3, 64\]"),
    "q channels": (dict(q=torch.ones(ROWS, HEADS, 32)), r"q: expected shape \[T, at least 1, 64\], got \[3, 2, 32\]"),
    "q heads": (dict(q=torch.ones(ROWS, 0, DIM)), r"q: expected shape \[T, at least 1, 64\]"),
    "q channel stride": (dict(q=torch.ones(ROWS, DIM, HEADS).mT), "q: expected unit channel stride"),
    "q stride": (dict(q=torch.ones(ROWS, HEADS, DIM + 4)[..., :DIM]), "q: expected unit channel stride and other"),
    "q address": (
        dict(q=torch.ones(ROWS * HEADS * DIM + 8)[1 : 1 + ROWS * HEADS * DIM].view(ROWS, HEADS, DIM)),
        "q: expected an address that is a multiple of 16",
    ),
    "indices": (dict(window_indices=None), "window_indices: expected a torch.Tensor, got NoneType"),
    "indices dtype": (
        dict(window_indices=ints(ROWS, 4, dtype=torch.int64)),
        "window_indices: expected dtype int32, got int64",
    ),
    "indices rows": (dict(window_indices=ints(ROWS + 1, 4)), "window_indices: expected 3 elements, got 4"),
    "indices stride": (dict(window_indices=ints(4, ROWS).T), "window_indices: expected unit column stride"),
    "lengths dtype": (
        dict(window_lengths=ints(ROWS, dtype=torch.int64)),
        "window_lengths: expected dtype int32, got int64",
    ),
    "lengths rows": (
        dict(window_lengths=ints(ROWS - 1)),
        r"window_lengths: expected a contiguous tensor of shape \[3\]",
    ),
    "lengths stride": (dict(window_lengths=ints(ROWS, 2)[:, 0]), "window_lengths: expected a contiguous tensor"),
    "compressed": (dict(compressed=torch.ones(3)), "compressed: expected a EntryPool, got Tensor"),
    "compressed keys": (dict(compressed=pool(indexer=True)), "compressed: expected a pool of window or compressed"),
    "compressed format": (
        dict(compressed=pool("bf16")),
        r"compressed: expected format, head_dim and rope_dim of the window pool, \('fp32', 64, 16\), got \('bf16'",
    ),
    "compressed rope": (dict(compressed=pool(rope=8)), "compressed: expected format, head_dim and rope_dim"),
    "no compressed indices": (
        dict(compressed_indices=None),
        "compressed: expected indices and lengths with it, got none",
    ),
    "no compressed lengths": (
        dict(compressed_lengths=None),
        "compressed: expected indices and lengths with it, got none",
    ),
    "no compressed pool": (
        dict(compressed=None),
        "compressed: expected a pool for its indices, lengths and rows, got none",
    ),
    "compressed indices": (dict(compressed_indices=ints(2, 5)), "compressed_indices: expected 3 elements, got 2"),
    "sink heads": (dict(sink=torch.zeros(HEADS + 1)), r"sink: expected a contiguous tensor of shape \[2\]"),
    "sink dtype": (dict(sink=torch.zeros(HEADS).bfloat16()), "sink: expected dtype float32, got bfloat16"),
    "scale zero": (dict(scale=0.0), r"scale: expected a number above 0, at most 1e\+30, got 0.0"),
    "scale infinite": (dict(scale=float("inf")), r"scale: expected a number above 0, at most 1e\+30, got inf"),
    "scale nan": (dict(scale=float("nan")), r"scale: expected a number above 0, at most 1e\+30, got nan"),
    "scale huge": (dict(scale=3e38), r"scale: expected a number above 0, at most 1e\+30, got 3e\+38"),
    "scale tensor": (dict(scale=torch.ones(())), r"scale: expected a number above 0, at most 1e\+30"),
    "no positions": (dict(positions=None), "positions: expected positions and rope, or none of them, got one"),
    "no rope": (dict(rope=None), "rope: expected positions and rope, or none of them, got one"),
    "positions dtype": (dict(positions=torch.ones(ROWS)), "positions: expected dtype int32 or int64, got float32"),
    "rope width": (dict(rope=torch.ones(7, 8)), r"rope: expected a contiguous tensor of shape \[at least 1, 16\]"),
    "rope rows": (dict(rope=torch.ones(0, ROPE)), "rope: expected a contiguous tensor of shape"),
    "rope address": (
        dict(rope=torch.ones(7 * ROPE + 4)[1 : 1 + 7 * ROPE].view(7, ROPE)),
        "rope: expected an address that is a multiple of 16",
    ),
    "lse": (dict(lse=torch.ones(ROWS, HEADS + 1)), r"lse: expected a contiguous tensor of shape \[3, 2\]"),
    "out dtype": (dict(out=torch.ones(ROWS, HEADS, DIM).bfloat16()), "out: expected dtype float32, got bfloat16"),
    "out shape": (dict(out=torch.ones(ROWS, HEADS + 1, DIM)), r"out: expected shape \[3, 2, 64\], got \[3, 3, 64\]"),
    "out shares memory": (
        dict(out=torch.ones(1, HEADS, DIM).expand(ROWS, HEADS, DIM)),
        "out: expected strides by which no elements share memory",
    ),
    "list rows": (
        dict(compressed_rows=ints(ROWS + 1)),
        r"compressed_rows: expected a contiguous tensor of shape \[3\]",
    ),
    "list rows dtype": (
        dict(compressed_rows=ints(ROWS, dtype=torch.int64)),
        "compressed_rows: expected dtype int32, got int64",
    ),
    "out stride": (dict(out=torch.ones(ROWS, DIM, HEADS).mT), "out: expected unit channel stride"),
    "impl": (dict(impl="cuda"), "impl: expected one of"),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_refusals(case: tuple[dict[str, object], str]) -> None:
    changed, message = case
    given = {**arguments(), **changed}
    with pytest.raises(ValueError, match=message):
        sparse_attention(**given)  # type: ignore[arg-type]
    for name in ("out", "lse"):
        if name not in changed:
            assert (given[name] == 9.0).all()  # type: ignore[attr-defined]


def test_nothing_of_these_is_refused() -> None:
    """The arguments that the refusals change."""
    given = arguments()
    found = sparse_attention(**given)  # type: ignore[arg-type]
    assert found is given["out"]
    assert not (found == 9.0).any()


def test_strides_of_a_single_head_or_column_do_not_matter() -> None:
    q = torch.ones(ROWS, 1, DIM + 3)[:, :, :DIM]
    wide = torch.ones(ROWS, 1, DIM * 2)[:, :, :DIM].as_strided((ROWS, 1, DIM), (DIM * 2, 5, 1))
    indices = ints(1, ROWS).T
    found = sparse_attention(wide, pool(), indices, ints(ROWS))
    assert found.shape == (ROWS, 1, DIM)
    with pytest.raises(ValueError, match="q: expected unit channel stride"):
        sparse_attention(q, pool(), indices, ints(ROWS))
