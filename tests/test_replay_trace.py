"""Traces: what is read, what is refused with a line number, what is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4_backend.replay import TraceRequest, load_trace, synthetic_trace
from dsv4_backend.replay.trace import prefix_chains

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_requests_come_in_the_order_of_their_timestamps(tmp_path: Path) -> None:
    lines = [GOOD | {"timestamp": t, "output_length": k} for k, t in enumerate([30, 0.5, 30, 7], start=1)]
    trace = load_trace(write(tmp_path / "t.jsonl", *lines, ""))
    assert [request.output_length for request in trace] == [2, 4, 1, 3]
    assert trace[0] == TraceRequest(0.5, 600, 2, (0, 1))
    assert [request.output_length for request in load_trace(tmp_path / "t.jsonl", limit=2)] == [2, 4]


def test_the_last_generated_token_is_not_cached() -> None:
    assert TraceRequest(0, 600, 1, (0, 1)).cached_tokens == 600
    assert TraceRequest(0, 600, 3, (0, 1)).cached_tokens == 602


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected a JSON object, got '{'"),
        ("[1]", r"expected a JSON object, got '\[1\]'"),
        ("x" * 1000, "expected a JSON object, got 'x{60}...'"),
        (GOOD | {"input_length": 0, "hash_ids": []}, "input_length: expected at least 1, got 0"),
        (GOOD | {"input_length": -5}, "input_length: expected at least 1, got -5"),
        (GOOD | {"output_length": 0}, "output_length: expected at least 1, got 0"),
        (GOOD | {"output_length": 2.5}, "output_length: expected an int, got 2.5"),
        (GOOD | {"input_length": True}, "input_length: expected an int, got True"),
        (GOOD | {"input_length": "600"}, "input_length: expected an int, got '600'"),
        (GOOD | {"hash_ids": [0]}, "hash_ids: expected 2 ids .* of 600 tokens.*, got 1"),
        (GOOD | {"hash_ids": [0, 1, 2]}, "hash_ids: expected 2 ids .*, got 3"),
        (GOOD | {"hash_ids": [0, "1"]}, r"hash_ids: expected a list of ints, got \[0, '1'\]"),
        (GOOD | {"hash_ids": 7}, "hash_ids: expected a list of ints, got 7"),
        (GOOD | {"timestamp": None}, "timestamp: expected a number, got None"),
        (GOOD | {"timestamp": -1}, "timestamp: expected milliseconds of at least 0, got -1"),
        (GOOD | {"timestamp": float("nan")}, "timestamp: expected milliseconds of at least 0, got nan"),
        (GOOD | {"timestamp": 10**400}, "int too large"),
        ({k: v for k, v in GOOD.items() if k != "output_length"}, "output_length: expected an int, got nothing"),
    ],
    ids=str,
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(ValueError, match=rf"t\.jsonl, line 3: .*{message}"):
        load_trace(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="expected at least one request, got none"):
        load_trace(write(tmp_path / "empty.jsonl", "", ""))
    (tmp_path / "bytes.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"expected UTF-8 text, got byte 0xff"):
        load_trace(tmp_path / "bytes.jsonl")


def test_the_made_up_trace_has_borders_and_shared_prefixes() -> None:
    trace = synthetic_trace()
    assert trace == synthetic_trace(100, 0)
    assert trace != synthetic_trace(100, 1)
    assert len(trace) == 100
    assert [r.timestamp for r in trace] == sorted(r.timestamp for r in trace)
    tails = {request.input_length % 512 for request in trace}
    assert tails >= {1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 511, 0}
    first_blocks = [request.hash_ids[0] for request in trace if request.input_length >= 512]
    assert len(first_blocks) - len(set(first_blocks)) > 30
    assert {request.output_length for request in trace} >= {1, 2, 3, 4, 5, 128, 257}
    assert synthetic_trace(3, 7) == synthetic_trace(3, 7)


def test_chains_name_full_blocks_with_all_that_comes_before() -> None:
    trace = [
        TraceRequest(0, 1024, 1, (5, 6)),
        TraceRequest(0, 1100, 1, (5, 6, 7)),  # the last block is partial
        TraceRequest(0, 1024, 1, (9, 6)),
        TraceRequest(0, 511, 1, (5,)),
    ]
    first, second, third, last = prefix_chains(trace)
    assert first == second
    assert len(first) == 2
    assert set(third).isdisjoint(first), "block 6 after another block is another text"
    assert last == []
