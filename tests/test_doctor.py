"""`dsv4 doctor`: what this machine can run, and why not."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dsv4_backend.cli import app


def doctor(columns: int = 200) -> list[str]:
    """Its lines, on a terminal that wide."""
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert result.exception is None
    return [line.rstrip() for line in result.output.splitlines()]


def line_with(lines: list[str], start: str) -> str:
    found = [line.strip() for line in lines if line.strip().startswith(start)]
    assert len(found) == 1, lines
    return found[0]


def test_versions() -> None:
    lines = doctor()
    assert line_with(lines, "torch ").split()[-1] == torch.__version__
    assert line_with(lines, "numpy ").split()[-1] == np.__version__


def test_a_package_that_is_missing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def lookup(name: str) -> str:
        if name in ("triton", "flashinfer-python"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", lookup)
    lines = doctor()
    assert line_with(lines, "triton ").split() == ["triton", "-"]
    assert line_with(lines, "flashinfer-python ").split() == ["flashinfer-python", "-"]


def test_without_a_gpu_it_says_what_will_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert line_with(doctor(), "GPU: ") == "GPU: none that torch can use; --device cuda will be refused"


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA X [9]", major=9, minor=0, multi_processor_count=132, total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    name = "NVIDIA X [9] (sm_90, 132 SMs, 140 GiB)"
    assert line_with(doctor(), "GPU: ").startswith(f"GPU: {name}, {name}; CUDA ")


def test_every_feature_has_a_verdict_and_a_reason() -> None:
    lines = doctor()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["feature", "runs"])
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[start + 1 :]]
    assert len(rows) >= 2
    for feature, verdict, reason in rows:
        assert feature
        assert verdict in ("yes", "no")
        assert reason


def test_what_is_missing_comes_with_the_command_that_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    row = re.split(r"\s{2,}", line_with(doctor(), "--plot"))
    assert row == ["--plot", "no", "pip install matplotlib"]


def test_a_narrow_terminal_loses_nothing() -> None:
    text = "\n".join(doctor(60))
    assert "…" not in text
    assert torch.__version__ in text.split()


def test_memory_follows_capacity_and_model() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", "--memory"])
    assert result.exit_code == 0, result.output
    rows = {}
    for line in result.output.split("cache of all layers")[0].splitlines()[2:]:
        if not line.strip():
            continue
        mode, bucket, *sizes = line.split()[:6]
        rows[mode, int(bucket.replace(",", ""))] = [int(size.replace(",", "")) for size in sizes]
    flash, pro, flash_1m, pro_1m = rows["DECODE", 256]
    # Flash: 7 values of 4 bytes, 4 of 8, 256 pages, 128 window slots, 512 selected and 512 ratio-128 entries, 2 plans.
    assert flash == 256 * (7 * 4 + 4 * 8 + 4 * (256 + 128 + 512 + 512) + 2 * 16)
    assert pro - flash == pro_1m - flash_1m == 256 * 4 * 512
    assert flash_1m - flash == 256 * 4 * (4096 + 8192 - 256 - 512)
    # Once a request, 8,192 rows take less than eight times as much as 1,024 would once a row.
    assert rows["EXTEND", 8192][2] < rows["EXTEND", 2048][2] * 4
    assert "one a request" in result.output


def test_memory_is_cut_nowhere() -> None:
    result = CliRunner(env={"COLUMNS": "60"}).invoke(app, ["doctor", "--memory"])
    assert result.exit_code == 0, result.output
    headers = [line.split() for line in result.output.splitlines() if line.strip().startswith(("mode ", "model "))]
    assert [" ".join(words) for words in headers] == [
        "mode rows V4-Flash, 64K tokens V4-Pro, 64K tokens V4-Flash, 1024K tokens V4-Pro, 1024K tokens page tables",
        "model format requests window c4 c128 index keys state total rings (ratio 4 / ratio 128)",
    ]
    assert "…" not in result.output


def cache_sizes(*options: str) -> dict[tuple[str, ...], list[float]]:
    """The table of caches: (model, format, requests, rings) to GiB by kind and in all."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", "--memory", *options])
    assert result.exit_code == 0, result.output
    cells = [line.split() for line in result.output.split("cache of all layers")[1].splitlines()[2:]]
    return {(*row[:3], row[-1]): [float(cell.replace(",", "")) for cell in row[3:-1]] for row in cells}


def test_memory_of_caches_is_what_they_take() -> None:
    rows = cache_sizes()
    window, c4, c128, keys, state, total = rows["V4-Flash", "fp8", "1", "8/128"]
    assert total == pytest.approx(window + c4 + c128 + keys + state, abs=0.03)
    pages = 4097
    assert c4 == pytest.approx(21 * pages * 37_440 / 2**30, abs=0.01)
    assert c128 == pytest.approx(20 * pages * 1728 / 2**30, abs=0.01)
    assert keys == pytest.approx(21 * pages * 8448 / 2**30, abs=0.01)
    assert rows["V4-Flash", "fp8", "64", "16/256"][4] > 1.9 * rows["V4-Flash", "fp8", "64", "8/128"][4]
    assert rows["V4-Pro", "bf16", "8", "8/128"][1] > rows["V4-Flash", "bf16", "8", "8/128"][1]


def test_memory_of_caches_for_a_number_of_requests() -> None:
    rows = cache_sizes("--requests", "3")
    assert {key[2] for key in rows} == {"3"}
    for options in (["--requests", "3"], ["--memory", "--requests", "0"]):
        assert CliRunner().invoke(app, ["doctor", *options]).exit_code == 2
