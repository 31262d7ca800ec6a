"""Result files: refused early, whole or not there, never over something that is no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsv4_backend.files import atomic_file, check_writable


def test_a_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with atomic_file(path) as file:
        file.write("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(TypeError), atomic_file(path) as file:
        file.write("half") and file.write(2)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    with atomic_file(link, "wb") as file:
        file.write(b"after")
    assert link.is_symlink()
    assert target.read_text() == "after"


@pytest.mark.parametrize("kind", ["folder", "pipe", "no folder", "folder that takes no files"])
def test_refusals(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "no folder":
        path = tmp_path / "none" / "a"
    else:
        path = Path("/proc/dsv4.json")
        if not path.parent.is_dir():
            pytest.skip("no /proc")
    for use in (check_writable, lambda p: atomic_file(p).__enter__()):
        with pytest.raises(ValueError, match=f"^{path}: expected "):
            use(path)
    if kind == "pipe":
        assert path.is_fifo()
