"""`dsv4 bench metadata`: what it writes, and that it checks before it times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dsv4_backend import ForwardMode, MetadataBuilder, cli
from dsv4_bench import metadata as bench

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_POOL_PAGES", 100)


def small_cases() -> list[bench.Case]:
    return [
        bench.Case("decode", ForwardMode.DECODE, 2, 1024, live=700),
        bench.Case("verify", ForwardMode.TARGET_VERIFY, 2, 1024, live=700, width=4),
        bench.Case("ragged", ForwardMode.TARGET_VERIFY, 2, 1024, live=700, width=4, extends=(4, 3)),
        bench.Case("drafts", ForwardMode.DRAFT_DECODE, 2, 1024, live=700, num_steps=3, ratios=()),
        bench.Case("extend", ForwardMode.EXTEND, 2, 1024, live=700, extends=(300, 1)),
    ]


def test_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cases", small_cases)
    file = tmp_path / "a.json"
    result = CliRunner().invoke(cli.app, ["bench", "metadata", "--device", "cpu", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = {row["case"]: row for row in json.loads(file.read_text())["rows"]}
    assert {name: row["rows"] for name, row in rows.items()} == {
        "decode": 2,
        "verify": 8,
        "ragged": 7,
        "drafts": 4,
        "extend": 301,
    }
    assert all(row["host us"] > 0 and row["gpu us"] is None and row["KiB"] > 0 for row in rows.values())


def test_wrong_metadata_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    build, calls = MetadataBuilder.build, []

    def wrong_once(self: MetadataBuilder, *args: object, **kwargs: object) -> object:
        meta = build(self, *args, **kwargs)
        if not calls:
            meta.swa_page_indices[0, 5] += 1
        calls.append(meta)
        return meta

    monkeypatch.setattr(MetadataBuilder, "build", wrong_once)
    with pytest.raises(RuntimeError, match=r"decode: step 0 differs from the reference: swa_page_indices\[0, 5\]"):
        bench._run_case(small_cases()[0], CPU, "torch", None)


def test_cases_have_names_of_their_own_and_follow_the_geometry() -> None:
    names = [case.id for case in bench.cases()]
    assert len(set(names)) == len(names)
    for case in bench.cases():
        assert max(case.extends, default=1) <= case.live <= case.capacity
        assert len(case.extends) in (0, case.batch_size)
        case.geometry.check_drafts(case.width if case.width > 1 else 0)


def test_a_folder_without_the_peer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--peer: expected a folder with metadata_peer.py"):
        bench.Peer(tmp_path)
