"""What the tests of `dsv4 verify` share: folders of goldens to damage, and what the command must say then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from typer.testing import CliRunner, Result

from dsv4_backend.cli import app


def dsv4(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def expect_refusal(result: Result, *parts: object) -> None:
    """Exit code 2 and one line that names what is wrong."""
    assert result.exit_code == 2, result.output
    assert len(result.output.splitlines()) == 1
    assert result.output.startswith("error: ")
    for part in parts:
        assert str(part) in result.output


def on(device: str) -> torch.device:
    """The device as `dsv4 verify` would pick it."""
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def edit(path: Path, name: str, change: Callable[[np.ndarray], object]) -> None:
    """Replaces array `name` of a file by `change` of it; None removes it."""
    with np.load(path) as file:
        arrays = {n: file[n] for n in file.files}
    new = change(arrays[name].copy())
    if new is None:
        del arrays[name]
    else:
        arrays[name] = np.asarray(new)
    np.savez(path, **arrays)


def added(*place_and_amount: int) -> Callable[[np.ndarray], np.ndarray]:
    """A change that adds the last of the numbers at the place that the others name."""
    *place, amount = place_and_amount

    def change(array: np.ndarray) -> np.ndarray:
        array[tuple(place)] += amount
        return array

    return change


def _broken_deflate(path: Path) -> None:
    np.savez_compressed(path, kind="prefill", numbers=np.zeros(500_000))
    data = bytearray(path.read_bytes())
    start = data.find(b"numbers.npy") + 40
    data[start : start + 60] = b"\xff" * 60
    path.write_bytes(data)


def _half_a_zip(path: Path) -> None:
    np.savez(path, kind="prefill", numbers=np.arange(100))
    path.write_bytes(path.read_bytes()[:400])


def _unknown_compression(path: Path) -> None:
    np.savez(path, kind="prefill")
    data = bytearray(path.read_bytes())
    data[data.rfind(b"PK\x01\x02") + 10] = 97
    path.write_bytes(data)


def _single_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(3))


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "no bytes": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a zip"),
    "half a zip": _half_a_zip,
    "damaged data": _broken_deflate,
    "unknown compression": _unknown_compression,
    "a single array": _single_array,
    "python objects": lambda path: np.savez(path, kind=np.array([{}], dtype=object)),
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nothing.npz"),
}
"""What puts a file that is no .npz at a path."""
