"""`dsv4 bench planner`: what it writes, what it refuses, and that it checks before it times."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dsv4_backend import cli, installed
from dsv4_bench import planner as bench
from dsv4_bench import timing

CPU = torch.device("cpu")


def small_cases() -> list[bench.Case]:
    return [bench._verify(3), bench._case("decode B=2", [1, 1], [126, 7], decode=True)]


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["bench", "planner", *map(str, arguments)])
    return result.exit_code, result.output


def test_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cases", small_cases)
    files = [tmp_path / name for name in ("a.json", "a.csv", "a.png")]
    code, output = run("--device", "cpu", "--json", files[0], "--csv", files[1], "--plot", files[2])
    assert code == 0, output
    written = json.loads(files[0].read_text())
    assert [row["case"] for row in written["rows"]] == [case.id for case in small_cases()]
    assert all(row["host us"] > 0 and row["gpu us"] is None for row in written["rows"])
    assert {"chip", "torch", "triton", "date", "command"} <= written["environment"].keys()
    with files[1].open() as file:
        assert [row["rows"] for row in csv.DictReader(file)] == ["12", "2"]
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert "verify B=3 E=4" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device: expected auto, cpu or cuda, got 'tpu'"),
        (["--device", "cpu", "--peer", "."], "--peer: expected a CUDA GPU"),
        (["--device", "cpu", "--json", "nowhere/a.json"], "expected its folder to exist"),
        (["--device", "cpu", "--csv", "."], "expected a file name, got a folder"),
        (["--device", "cpu", "--impl", "cuda"], "impl: expected one of"),
    ],
)
def test_refuses_before_it_measures(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cases", lambda: pytest.fail("measured"))
    code, output = run(*arguments)
    assert code == 2
    assert message in output
    assert len(output.strip().splitlines()) == 1


def test_a_missing_plot_library_is_said_before_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "cases", lambda: pytest.fail("measured"))
    code, output = run("--device", "cpu", "--impl", "torch", "--plot", tmp_path / "a.png")
    assert code == 2
    assert "--plot: expected matplotlib, got none" in output


def test_a_wrong_plan_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_cases()[0]
    inputs = bench.Inputs.build(case, CPU)
    right, wrong = (bench._plan_function(case, inputs, "torch")() for _ in range(2))
    bench._expect_equal(case, right, wrong, "itself")
    wrong.c4.write[1, 0] += 1
    with pytest.raises(RuntimeError, match=r"verify B=3 E=4: c4.write differs from itself, first at \[1, 0\]"):
        bench._expect_equal(case, right, wrong, "itself")


def test_every_case_can_be_built() -> None:
    names = [case.id for case in bench.cases()]
    assert len(set(names)) == len(names)
    for case in bench.cases():
        assert len(case.extends) == len(case.prefixes)
        assert min(case.extends, default=0) >= 0
        assert case.num_rows >= sum(case.extends)
        if case.decode:
            assert set(case.extends) == {1}


@pytest.mark.gpu
def test_timing_on_a_gpu() -> None:
    x = torch.zeros(2**28, device="cuda")
    timed = timing.measure(lambda: x.add_(1), torch.device("cuda"))
    # 2 GiB read and written: no chip does it in less than 100 us.
    assert timed.gpu_p10_us <= timed.gpu_us <= timed.gpu_p90_us
    assert timed.gpu_us > 100
    assert timing.count_launches(lambda: x.add_(1)) == 1
