"""`dsv4 bench compressor`: what it writes, and that it checks before it times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dsv4_backend import cli
from dsv4_backend.reference import compressor as reference
from dsv4_backend.reference import kv_store
from dsv4_bench import compressor as bench
from dsv4_bench.compressor_peer import Peer, beyond_rounding

CPU = torch.device("cpu")


def small_cases() -> list[bench.Case]:
    return [
        bench.Case("c4", 4, (40,), (40,)),
        bench.Case("keys", 4, (40, 8), (), 128),
        bench.Case("c128", 128, (130, 128), (3, 128)),
        bench.Case("window", 0, (9,), (9,)),
    ]


def test_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cases", small_cases)
    file = tmp_path / "a.json"
    command = ["bench", "compressor", "--device", "cpu", "--impl", "torch", "--json", str(file)]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    rows = {row["case"]: row for row in json.loads(file.read_text())["rows"]}
    assert {name: row["rows"] for name, row in rows.items()} == {"c4": 40, "keys": 2, "c128": 131, "window": 9}
    assert all(row["host us"] > 0 and row["gpu us"] is None for row in rows.values())


def test_wrong_entries_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench.Inputs.run
    calls = []

    def wrong_once(self: bench.Inputs, impl: str, pool: object = None, state: torch.Tensor | None = None) -> None:
        run(self, impl, pool, state)  # type: ignore[arg-type]
        if not calls and state is not None:
            state[3] += 1
        calls.append(impl)

    monkeypatch.setattr(bench.Inputs, "run", wrong_once)
    with pytest.raises(RuntimeError, match="c4: state differs from the reference"):
        bench.run_case(small_cases()[0], CPU, "torch", None)


@pytest.mark.parametrize("case", small_cases()[:3], ids=lambda case: case.id)
def test_a_stored_value_counts_as_rounded_only_where_it_is(case: bench.Case) -> None:
    inputs = bench.Inputs(case, CPU)
    assert inputs.plans is not None
    entries = reference.completed(inputs.plans, case.ratio)
    windows = reference.read_windows(inputs.kv, inputs.state, entries, case.ratio)
    pooled = reference.pool_windows(windows, entries, inputs.bias, case.ratio)
    values = kv_store.norm_rope(pooled, inputs.norm_weight, 1e-6, entries.seq_len - case.ratio, inputs.rope)
    inputs.run("torch")
    slots = inputs.out_loc[entries.row]
    assert beyond_rounding(inputs.pool, slots, values) == 0
    assert beyond_rounding(inputs.pool, slots, values * (1 + 1e-6)) == 0
    assert beyond_rounding(inputs.pool, slots, values * 1.02) > values.numel() // 20


def test_cases_have_names_of_their_own() -> None:
    names = [case.id for case in bench.cases()]
    assert len(set(names)) == len(names)
    assert all(len(case.extends) in (0, len(case.lengths)) for case in bench.cases())


def test_a_folder_without_the_peer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--peer: expected a folder with compressor_peer.py"):
        Peer(tmp_path)
