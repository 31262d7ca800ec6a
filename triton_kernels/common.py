"""What all launchers share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on CPU tensors."""

LAUNCH_OPTIONS = ("num_warps", "launch_pdl")


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Constants of a kernel that supports programmatic dependent launch: on where the chip has it (Hopper on).

    With it a kernel gets ready while the one before it in the stream finishes. `PDL` makes it wait for that one's
    results before it reads anything.
    """
    pdl = not INTERPRET and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def _addresses(args: tuple[Any, ...]) -> list[Any]:
    return [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]


class FixedArgs:
    """Arguments that stay the same from launch to launch, as a kernel's first launch and the later ones want them."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args, self.addresses = args, tuple(_addresses(args))


class Launcher:
    """Launches a kernel whose integer arguments are not specialised, at a fraction of the usual host time.

    Triton looks at every argument of every launch to find the compiled kernel. Ours depends on little: the caller says
    what in `key`, and the compiled kernel is called directly from the second launch on.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        self._names: dict[tuple[Any, ...], int] = {}

    def name(self, key: tuple[Any, ...]) -> int:
        """A number for a part of keys, which costs less to look up than the part itself."""
        return self._names.setdefault(key, len(self._names))

    def __call__(
        self,
        device: torch.device,
        key: tuple[Any, ...],
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: Callable[[], dict[str, Any]],
        fixed: FixedArgs | None = None,
    ) -> None:
        """Launches a grid of programs on the current stream of `device`.

        Args:
            key: everything beside the device that decides which compilation serves: what the constants depend on,
                dtypes, and whether an integer needs 64 bits.
            grid: one or two dimensions.
            args: the kernel's arguments up to `fixed` and its constants, tensors as they are; None where a kernel does
                without.
            constants: gives the constants, all of them, in the order of the kernel's signature, and among them the
                launch options of `LAUNCH_OPTIONS`. Called for the first launch of a key only.
            fixed: the arguments between those, where they are the same at every launch.
        """
        grid = (*grid, 1, 1)[:3]
        if INTERPRET:
            self._kernel[grid](*args, *(fixed.args if fixed else ()), **constants())
        elif device.index == torch.cuda.current_device():
            self._launch((device.index, key), grid, args, constants, fixed)
        else:
            # Triton launches on the current device, whatever device the tensors are on.
            with torch.cuda.device(device):
                self._launch((device.index, key), grid, args, constants, fixed)

    def _launch(
        self,
        key: tuple[Any, ...],
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: Callable[[], dict[str, Any]],
        fixed: FixedArgs | None,
    ) -> None:
        found = self._compiled.get(key)
        if found is not None:
            compiled, values = found
            # Addresses, because Triton would ask each tensor for its own and then the driver whether it is valid.
            compiled[grid](*_addresses(args), *(fixed.addresses if fixed else ()), *values)
            return
        named = constants()
        compiled = self._kernel[grid](*args, *(fixed.args if fixed else ()), **named)
        self._compiled[key] = compiled, tuple(v for name, v in named.items() if name not in LAUNCH_OPTIONS)
