"""What projections of an attention layer need: joint products, norms and rope of queries, shared rope tables."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import nn

from dsv4_backend.config import DSV4Config
from dsv4_backend.rope import rope_table

_rope_tables: WeakValueDictionary[tuple[DSV4Config, bool, torch.device], torch.Tensor] = WeakValueDictionary()


def shared_rope_table(cfg: DSV4Config, ratio: int, device: torch.device) -> torch.Tensor:
    """`rope_table` of a layer, the same tensor for all layers of a model that turn alike, while one of them lives."""
    key = (cfg, ratio > 0, device)
    table = _rope_tables.get(key)
    if table is None:
        table = _rope_tables[key] = rope_table(cfg, ratio, device=device)
    return table


def join(parts: Sequence[nn.Parameter]) -> None:
    """Moves matrices of as many columns behind one another into one new tensor; they stay parameters of their own."""
    whole = torch.cat([part.detach() for part in parts])
    for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows


def joint(parts: Sequence[nn.Parameter]) -> torch.Tensor:
    """[rows of all, columns]: the matrix that joined ones are together; joins them if they are not (any more)."""
    if not _adjacent(parts):
        join(parts)
    columns = parts[0].shape[1]
    return parts[0].as_strided((sum(map(len, parts)), columns), (columns, 1))


def _adjacent(parts: Sequence[nn.Parameter]) -> bool:
    """Whether matrices lie one behind the other in one storage."""
    storage, end = parts[0].untyped_storage().data_ptr(), parts[0].data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.data_ptr() != end or not part.is_contiguous():
            return False
        end += part.nbytes
    return True


def float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [T, rows]: `x` times `weight`, accumulated and returned in float32."""
    if x.dtype == torch.float32:
        return x @ weight.T
    if x.device.type == "cuda":
        return torch.mm(x, weight.T, out_dtype=torch.float32)  # cuBLAS stores its accumulators
    return x.float() @ weight.float().T  # torch has no such product on a CPU


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm with weight: float32 inside, rounded to the dtype of `values`."""
    wide = values.float()
    return (wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight).to(values.dtype)


def norm_rope_heads(query: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor, eps: float) -> torch.Tensor:
    """Queries [T, heads, head_dim] after a norm of each head without weight, and rope: float32 inside, rounded once.

    Args:
        query: float32 or bfloat16.
        positions: int [T].
        rope: float32 [positions, rope_dim]; a position beyond it is taken as its last.
        eps: what the norm adds to the mean square.
    """
    size = torch.linalg.vector_norm(query, dim=-1, keepdim=True, dtype=torch.float32)
    factor = (size.square() / query.shape[-1] + eps).rsqrt()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    start = query.shape[-1] - rope.shape[1]
    torch.mul(query[..., :start], factor, out=out[..., :start])
    turning = (query[..., start:] * factor).unflatten(-1, (-1, 2))
    table = torch.view_as_complex(rope.view(len(rope), -1, 2))
    angle = table[positions.clamp(0, len(table) - 1)]
    turned = torch.view_as_complex(turning) * angle[:, None]
    out[..., start:] = torch.view_as_real(turned).flatten(-2)
    return out
