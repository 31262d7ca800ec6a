"""What commands say on stderr while they work, where it is no terminal."""

from __future__ import annotations

import time

import pytest

from dsv4_backend.commands.common import plain_lines, show_progress


def test_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([100.0, 100.5, 101.0, 101.9, 105.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    say = plain_lines("kernels", 1.0)
    for case in "abcde":
        say(case)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["kernels: a", "kernels: c", "kernels: e"]


def test_without_a_terminal_lines_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("planner", every=0.0) as progress:
        progress("decode [B=1]")
    assert capsys.readouterr().err == "planner: decode [B=1]\n"
