"""Copies from the host that it does not wait for."""

from __future__ import annotations

import torch


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of host values on `device`, enqueued on the current stream; on a CPU, `values` themselves.

    The host does not wait: values go by pinned memory, which torch keeps until the copy is done. Not for a region that
    a CUDA graph captures.
    """
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
