"""`dsv4 bench kernels`: what it writes, what it refuses to time, and whom it asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dsv4_backend import cli
from dsv4_bench import attention, attention_peers, compressor, indexer, kernels

CPU = torch.device("cpu")
SMALL = attention.Case(3, 2, "bf16", window=5, selected=7, pages=2)


class Peer:
    """Gives our own results, times a factor."""

    name = "another"

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def serves(self, case: attention.Case) -> bool:
        return case.format == "bf16"

    def prepare(self, inputs: attention.Inputs) -> Callable[[], torch.Tensor]:
        return lambda: inputs.run("torch") * self.factor


def test_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "cases", lambda: [SMALL, attention.Case(2, 1, "fp8", 3, 4, 2)])
    monkeypatch.setattr(indexer, "cases", lambda: [indexer.Case(2, 70)])
    monkeypatch.setattr(compressor, "cases", lambda: [compressor.Case("c4", 4, (9,), (9,))])
    file = tmp_path / "kernels.json"
    command = ["bench", "kernels", "--device", "cpu", "--impl", "torch", "--json", str(file)]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == [
        "attention bf16, 2 heads, N=3",
        "attention fp8, 1 heads, N=2",
        "index scores fp8, N=2, 70 entries",
        "select 512 fp8, N=2, 70 entries",
        "c4",
    ]
    assert all(row["host us"] > 0 and row["gpu us"] is None and row["peer"] is None for row in rows)


def test_a_cpu_runs_the_small_cases_and_says_how_many_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = kernels.choose(CPU)
    assert {(case.rows, case.format) for case in chosen.attention} == {(1, "fp8"), (1, "bf16")}
    assert {(case.rows, case.entries) for case in chosen.indexer} == {(1, 1250), (1, 16_384)}
    assert [case.id for case in chosen.compressor] == [
        *(
            f"{kind}, decode B=1{end}"
            for kind in ("c4 core", "c4 indexer", "c128 core")
            for end in ("", ", all complete")
        ),
        "window, 256 rows",
    ]
    assert kernels.choose(torch.device("cuda")) == (attention.cases(), indexer.cases(), compressor.cases())
    assert kernels.left_out(torch.device("cuda")) == ""
    monkeypatch.setattr(attention, "cases", lambda: [SMALL, attention.Case(512, 64, "bf16")])
    monkeypatch.setattr(indexer, "cases", lambda: [indexer.Case(1, 262_144)])
    monkeypatch.setattr(compressor, "cases", lambda: [compressor.Case("c4", 4, (65_536,), (65_536,))])
    file = tmp_path / "kernels.json"
    result = CliRunner().invoke(
        cli.app, ["bench", "kernels", "--device", "cpu", "--impl", "torch", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert [row["case"] for row in written["rows"]] == [SMALL.id]
    title = "kernels of a layer, impl torch; 3 of 4 cases left out, which take too long on a CPU"
    assert written["environment"]["title"] == title
    assert title in result.stdout
    assert result.stderr == f"kernels: {SMALL.id}\n"


def test_the_peers_are_looked_for_before_anything_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_peers, "find", lambda directory: [])
    monkeypatch.setattr(attention, "cases", lambda: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"--peer: expected a folder with compressor_peer\.py"):
        kernels.run(CPU, "torch", tmp_path, lambda case: None)


def test_cases_are_those_of_the_design() -> None:
    shapes = {(case.rows, case.heads, case.format) for case in attention.cases()}
    assert {(n, h, f) for n in (1, 32, 128, 512) for h in (64, 128) for f in ("fp8", "bf16")} <= shapes
    assert {(4096, 64, "bf16"), (4096, 128, "bf16")} <= shapes
    assert all(case.window + case.selected == 640 for case in attention.cases())


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = attention.Inputs.run
    monkeypatch.setattr(
        attention.Inputs, "run", lambda self, impl, rows=None: run(self, impl, rows) * (1.1 if rows is None else 1)
    )
    with pytest.raises(RuntimeError, match="result differs from the reference by"):
        attention.run_case(SMALL, CPU, "torch", [])


def test_a_peer_that_differs_is_not_timed() -> None:
    with pytest.raises(RuntimeError, match="result of another differs"):
        attention.run_case(SMALL, CPU, "torch", [Peer(1.1)])
    assert attention.run_case(SMALL, CPU, "torch", [Peer()])["case"] == SMALL.id


@pytest.mark.parametrize("wrong", ["scores", "selection"])
def test_a_wrong_indexer_is_not_timed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = indexer.Inputs(indexer.Case(2, 600), CPU)
    name = {"scores": "index_scores", "selection": "select_topk"}[wrong]
    true, calls = getattr(indexer, name), []

    def wrong_once(*args: object, out: torch.Tensor, **rest: object) -> None:
        true(*args, out=out, **rest)
        if not calls:
            out[1] += 1
        calls.append(1)

    monkeypatch.setattr(indexer, name, wrong_once)
    with pytest.raises(RuntimeError, match="index scores.*differ" if wrong == "scores" else "select.*differs"):
        indexer.check(inputs, "torch")


def test_a_folder_without_the_peer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--peer: expected a folder with flashmla_peer\.py"):
        attention_peers.find(tmp_path)
    assert attention_peers.find(None) == []


def test_one_pool_with_one_list_for_peers() -> None:
    inputs = attention.Inputs(SMALL, CPU)
    rows, indices, lengths = attention_peers._union(inputs)
    assert indices.shape == (3, 12)
    assert lengths.tolist() == [12, 12, 12]
    first = inputs.compressed.data[inputs.selected[1, 0].long()]
    assert torch.equal(rows[indices[1, 5].long()], first)


def test_packed_pages_for_peers() -> None:
    inputs = attention.Inputs(attention.Case(1, 1, "fp8", 3, 4, 2), CPU)
    blocks = attention_peers._blocks(inputs.compressed)
    assert blocks.shape == (2, 64, 1, 584)
    assert blocks.stride(0) == inputs.compressed.layout.page_bytes
    assert blocks.data_ptr() == inputs.compressed.data.data_ptr()
