"""`dsv4 replay`: exit codes, what goes to which stream, and the files it leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from dsv4_backend import installed
from dsv4_backend.commands import replay as command
from dsv4_backend.replay import synthetic_trace
from dsv4_backend.replay.metadata_faults import METADATA_FAULTS
from dsv4_backend.replay.plan_faults import PLAN_FAULTS

app = typer.Typer(pretty_exceptions_enable=False)
app.command("replay")(command.replay)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [*map(str, args), "--device", "cpu"])


def write_trace(path: Path, count: int = 4) -> Path:
    lines = [
        json.dumps({"timestamp": r.timestamp, "input_length": r.input_length, "output_length": min(r.output_length, 9),
                    "hash_ids": list(r.hash_ids)})
        for r in synthetic_trace(count)
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_clean_run_ends_with_a_table(tmp_path: Path) -> None:
    result = run("--trace", write_trace(tmp_path / "t.jsonl"), "--drafts", 4)
    assert result.exit_code == 0, result.output
    for part in (
        *("4 of 4", "TARGET_VERIFY", "compress rows c128", "prefix-hit tokens", "violations"),
        *("plan, p50 / p99", "metadata DRAFT_DECODE: rows checked", "build DRAFT_EXTEND, p50 / p99"),
    ):
        assert part in result.stdout
    assert result.stderr == "", "no bar where nobody watches"
    assert not list(tmp_path.glob("*.npz"))


def test_the_default_trace_needs_no_file() -> None:
    result = run("--requests", 5)
    assert result.exit_code == 0, result.output
    assert "5 of 5" in result.stdout


def test_a_replay_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, replay_trace = [], command.replay_trace

    def watched(*args: object) -> object:
        seen.append(torch.get_num_threads())
        return replay_trace(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "replay_trace", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run("--requests", 1).exit_code == 0
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_json_holds_all_numbers_and_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dsv4", "replay", "--seed", "3"])
    out = tmp_path / "out.json"
    assert run("--requests", 5, "--json", out, "--seed", 3, "--mixed").exit_code == 0
    content = json.loads(out.read_text())
    assert content["command"] == ["dsv4", "replay", "--seed", "3"]
    assert set(content["versions"]) == {"dsv4_backend", "python", "torch", "numpy"}
    assert content["date"].startswith("20")
    assert content["options"] | {"seed": 3, "mixed": True, "impl": "torch", "device": "cpu"} == content["options"]
    numbers, steps = content["summary"], content["per_step"]
    assert numbers["finished"] == numbers["requests"] == 5
    assert numbers["violations"] == 0
    assert sum(numbers["steps"].values()) == len(steps["mode"]) == len(steps["rows"]) == len(steps["plan_us"])
    assert numbers["rows"] == sum(steps["rows"])
    assert numbers["plan_us"]["p50"] <= numbers["plan_us"]["p99"]
    assert numbers["compress_rows"]["c4"] > numbers["compress_rows"]["c128"] > 0
    builds = {"EXTEND", "DECODE", "IDLE"}
    assert (
        set(numbers["build_us_by_mode"]) == set(numbers["metadata_builds"]) == set(numbers["metadata_rows"]) == builds
    )
    assert numbers["build_us_by_mode"]["DECODE"]["p50"] <= numbers["build_us_by_mode"]["DECODE"]["p99"]
    assert {mode: numbers["metadata_builds"][mode] for mode in ("EXTEND", "DECODE")}.items() <= numbers["steps"].items()
    assert numbers["metadata_rows"]["EXTEND"] + numbers["metadata_rows"]["DECODE"] > numbers["rows"], "padding counts"
    assert len(steps["build_us"]) == len(steps["plan_us"])
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "no temporary file is left"


def test_plot_is_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    assert run("--requests", 5, "--plot", out).exit_code == 0
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("fault", "kind"), [("wrong_page", "stale_read"), ("first_slots", "write_slot")])
def test_a_violation_leaves_a_step_file_beside_the_json(fault: str, kind: str, tmp_path: Path) -> None:
    result = run("--requests", 8, "--drafts", 4, "--inject", fault, "--json", tmp_path / "out.json")
    assert result.exit_code == 1
    first = result.stderr.splitlines()[0]
    assert kind in first
    assert "request" in first
    (step_file,) = tmp_path.glob("dsv4-violation-step*.npz")
    assert f"dsv4 replay --step {step_file}" in result.stderr.replace("\n", " ")
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["summary"]["violations"] >= 1
    assert content["violations"][0]["message"] == first

    again = run("--step", step_file)
    assert again.exit_code == 1
    assert f"with the fault {fault}" in again.stdout
    assert again.stderr.splitlines()[0] == first


def test_a_step_that_is_mended_ends_with_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--requests", 8, "--inject", "dropped_row").exit_code == 1
    (step_file,) = tmp_path.glob("dsv4-violation-step*.npz")
    with np.load(step_file) as file:
        arrays = dict(file)
    meta = json.loads(str(arrays["meta"]))
    arrays["meta"] = np.array(json.dumps(meta | {"fault": None}))
    np.savez(step_file, **arrays)
    result = run("--step", step_file)
    assert result.exit_code == 0
    assert "no violation" in result.stdout


def broken_files(folder: Path) -> dict[str, Path]:
    """Step files that were cut off, changed, or are something else."""
    run("--requests", 3, "--inject", "dropped_row", "--json", folder / "out.json")
    (good,) = folder.glob("dsv4-violation-step*.npz")
    with np.load(good) as file:
        arrays = dict(file)
    meta = json.loads(str(arrays["meta"]))

    def changed(name: str, **new: np.ndarray) -> Path:
        path = folder / f"{name}.npz"
        np.savez(path, **(arrays | new))
        return path

    cut = folder / "cut.npz"
    cut.write_bytes(good.read_bytes()[:-200])
    text = folder / "text.npz"
    text.write_text("hello")
    np.savez(folder / "other.npz", a=np.zeros(3))
    return {
        "cut": cut,
        "text": text,
        "other": folder / "other.npz",
        "missing": folder / "missing.npz",
        "folder": folder,
        "format": changed("format", meta=np.array(json.dumps(meta | {"format": "later"}))),
        "fault": changed("fault", meta=np.array(json.dumps(meta | {"fault": "gremlin"}))),
        "mode": changed("mode", meta=np.array(json.dumps(meta | {"mode": "NAP"}))),
        "bucket": changed("bucket", meta=np.array(json.dumps(meta | {"num_rows": 0}))),
        "lengths": changed("lengths", extend_lens=arrays["extend_lens"] + 1),
        "rows": changed("rows", req_pool_indices=arrays["req_pool_indices"] + 1000),
        "accepts": changed("accepts", accepts=arrays["accepts"] + 1),
        "slots": changed("slots", table=arrays["table"] + 2**30),
        "window": changed("window", full_to_swa=arrays["full_to_swa"] + 2**40),
        "ledger": changed("ledger", ledger_recent=np.zeros((2, 2), np.int64)),
        "contents": changed("contents", ledger_entries=np.zeros(2, np.int64)),
    }


def test_a_step_file_that_cannot_be_used_is_one_line_and_exit_two(tmp_path: Path) -> None:
    for name, path in broken_files(tmp_path).items():
        result = run("--step", path)
        assert result.exit_code == 2, name
        assert result.stderr.startswith("error: "), name
        assert result.stderr.count("\n") == 1, name


def test_a_fault_that_never_has_an_effect_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 2, "output_length": 1, "hash_ids": [1]}\n')
    result = run("--trace", path, "--inject", "wrong_page")
    assert result.exit_code == 2
    assert "error: --inject wrong_page: expected a step on which it has an effect, got none" in result.stderr


@pytest.mark.parametrize(
    ("faults", "fault"), [(PLAN_FAULTS, "dropped_row"), (METADATA_FAULTS, "stale_page")], ids=["plan", "metadata"]
)
def test_a_fault_that_goes_unnoticed_is_an_error(
    faults: dict[str, object], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(faults, fault, lambda images, step: True)
    result = run("--requests", 3, "--inject", fault)
    assert result.exit_code == 1
    assert "went unnoticed" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--trace", "none.jsonl"), "No such file"),
        (("--trace", "bad.jsonl"), "bad.jsonl, line 2: hash_ids: expected 1 ids"),
        (("--requests", 0), "--requests: expected at least 1, got 0"),
        (("--requests", -3), "--requests: expected at least 1, got -3"),
        (("--chunk-size", 0), "chunk_size: expected at least 1, got 0"),
        (("--max-running", -1), "max_running: expected at least 1, got -1"),
        (("--drafts", 11), "num_draft_tokens: expected at most 10, got 11"),
        (("--drafts", 2, "--mixed"), "mixed: expected drafts 0"),
        (("--inject", "gremlin"), "fault: expected one of"),
        (("--impl", "fast"), "impl: expected one of"),
        (("--json", "no/such/folder.json"), "folder"),
        (("--plot", "no/such/folder.png"), "folder"),
        (("--json", "."), "expected a file name"),
        (("--trace", "huge.jsonl"), "request 0: expected at most 1048576 tokens"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_exit_two_before_anything_runs(
    args: tuple[object, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = '{"timestamp": 0, "input_length": 2, "output_length": 1, "hash_ids": [1]}\n'
    Path("bad.jsonl").write_text(good + good.replace("[1]", "[1, 2]"))
    Path("huge.jsonl").write_text(good.replace('"output_length": 1', '"output_length": 2000000'))
    monkeypatch.setattr(command, "replay_trace", lambda *_: pytest.fail("a replay began"))
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_missing_plot_library_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "replay_trace", lambda *_: pytest.fail("a replay began"))
    result = run("--plot", tmp_path / "out.png")
    assert result.exit_code == 2
    assert "expected matplotlib" in result.stderr
    assert "pip install matplotlib" in result.stderr
