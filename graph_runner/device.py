"""Devices, by the name that their tensors have."""

from __future__ import annotations

import torch


def normal_device(device: torch.device | str) -> torch.device:
    """`device` with the index that a tensor on it has: "cuda" is the current CUDA device."""
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)
