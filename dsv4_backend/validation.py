"""Checks of caller tensors, with messages that say what was expected and what came."""

from __future__ import annotations

import torch

INT_DTYPES = (torch.int32, torch.int64)


def expect_tensor(
    name: str,
    value: object,
    *,
    dtypes: tuple[torch.dtype, ...],
    ndim: int,
    size: int | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """`value`, once it is known to be a tensor of that kind; raises ValueError otherwise.

    Args:
        name: the caller's name for it, which begins the message.
        dtypes: accepted dtypes.
        ndim: number of dimensions.
        size: length of the first dimension, where it must match something.
        device: where it must live.
    """
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name}: expected dtype {names}, got {str(value.dtype).removeprefix('torch.')}")
    if value.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimension{'s' * (ndim != 1)}, got shape {list(value.shape)}")
    if size is not None and value.shape[0] != size:
        raise ValueError(f"{name}: expected {size} elements, got {value.shape[0]}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {value.device}")
    return value


def expect_dense(
    name: str,
    value: object,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device | None,
    *,
    aligned: bool = False,
) -> torch.Tensor:
    """`value`, once it is known to be a contiguous tensor of that shape; None: any size.

    Args:
        name, dtypes, device: as for `expect_tensor`.
        aligned: on a 16-byte boundary, too.
    """
    tensor = expect_tensor(name, value, dtypes=dtypes, ndim=len(shape), device=device)
    fits = all(want in (None, got) for want, got in zip(shape, tensor.shape, strict=True))
    if not fits or not tensor.is_contiguous():
        wanted = ["any" if size is None else size for size in shape]
        raise ValueError(
            f"{name}: expected a contiguous tensor of shape {wanted}, got shape {list(tensor.shape)}, strides "
            f"{list(tensor.stride())}"
        )
    if aligned:
        expect_aligned(name, tensor)
    return tensor


def expect_aligned(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless a tensor lies on a 16-byte boundary, which kernels load from."""
    if tensor.data_ptr() % 16:
        raise ValueError(f"{name}: expected an address that is a multiple of 16, got {tensor.data_ptr():#x}")


def expect_type(name: str, value: object, kind: type) -> None:
    """Raises ValueError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")


def expect_range(name: str, values: torch.Tensor, low: int, high: int, limit: str) -> None:
    """Raises ValueError for the first of `values`, ints [n] on the host, outside low .. high, which `limit` names."""
    bad = ((values < low) | (values > high)).nonzero()
    if len(bad):
        b = int(bad[0])
        raise ValueError(f"{name}[{b}]: expected {low} to {high} ({limit}), got {int(values[b])}")


def expect_separate(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless each element of a tensor that is to be written has memory of its own.

    Sure of that are strides that nest: each is at least what the smaller ones reach.
    """
    if not tensor.numel():
        return
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                raise ValueError(
                    f"{name}: expected strides by which no elements share memory, got shape {list(tensor.shape)} with "
                    f"strides {list(tensor.stride())}"
                )
            extent += stride * (size - 1)
