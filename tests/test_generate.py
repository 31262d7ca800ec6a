"""Tokens of the example's engine are Hugging Face's, however requests arrive; and the command that says so."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers", minversion="5.17")

from dsv4_backend import CacheSize, ForwardMode
from dsv4_backend.cli import app
from dsv4_examples.hf_dsv4 import measure
from dsv4_examples.hf_dsv4.engine import Engine
from dsv4_examples.hf_dsv4.measure import METADATA_KERNELS, metadata_us, warm_up
from dsv4_examples.hf_dsv4.reference import Reference, compare
from hf_harness import Case, Guesses, case, each_device, each_model
from layout import ROOT
from test_readme import blocks

LENGTHS = (1, 2, 3, 4, 5, 8, 31, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1500)
LONGEST = {1: 9, 3: 33, 7: 129, 64: 257, 200: 513}
"""By chunk size, the longest prompt that is tried in such chunks."""
NEW = 5
SCHEDULES = 30
"""Random schedules of a test: one such test on a CPU, ten on a GPU."""


@each_model
def test_one_at_a_time(name: str, device: str) -> None:
    served = case(name, device)
    engine = served.engine(max_requests=1, max_len=LENGTHS[-1] + NEW)
    for length in LENGTHS:
        request = engine.add(served.tokens(length, seed=length), NEW)
        engine.run()
        assert served.check(engine, [request]) == 0
    assert engine.statistics.steps == {"EXTEND": len(LENGTHS), "DECODE": (NEW - 1) * len(LENGTHS)}
    assert engine.statistics.bucket_steps == engine.statistics.steps["DECODE"]


@each_model
def test_all_at_once(name: str, device: str) -> None:
    served = case(name, device)
    engine = served.engine(max_requests=len(LENGTHS), max_len=LENGTHS[-1] + NEW, chunk_size=sum(LENGTHS))
    requests = [engine.add(served.tokens(length, seed=length), NEW) for length in LENGTHS]
    engine.run()
    assert served.check(engine, requests) == 0
    assert engine.statistics.steps == {"EXTEND": 1, "DECODE": NEW - 1}


@each_model
@pytest.mark.parametrize("chunk", LONGEST)
def test_in_chunks(name: str, device: str, chunk: int) -> None:
    served = case(name, device)
    engine = served.engine(max_requests=3, max_len=LENGTHS[-1] + NEW, chunk_size=chunk)
    requests = [
        engine.add(served.tokens(length, seed=length), NEW) for length in reversed(LENGTHS) if length <= LONGEST[chunk]
    ]
    engine.run()
    assert served.check(engine, requests) == 0


@each_device
def test_without_capture_nothing_is_padded(device: str) -> None:
    served = case("small", device)
    options = dict(geom=served.config.geometry(), max_requests=3, max_len=200, chunk_size=100)
    engine = Engine(served.model, **options)  # type: ignore[arg-type]
    requests = [engine.add(served.tokens(length, seed=length), NEW) for length in (33, 128, 5)]
    engine.run()
    assert served.check(engine, requests) == 0
    assert engine.statistics.bucket_steps == 0


@cache
def scheduled_engines(device: str) -> list[Engine]:
    """Engines of different sizes, some of them short of pages."""
    served = case("small", device)
    tight = CacheSize(num_pages=5, num_window_pages=21, num_requests=6)
    return [
        served.engine(chunk_size=200, max_requests=2),
        served.engine(chunk_size=64, max_requests=5, max_len=320, size=tight),
        served.engine(chunk_size=17, max_requests=6, max_len=320),
        served.engine(chunk_size=128, max_requests=5, max_len=320, size=tight),
        served.engine(chunk_size=500, max_requests=8),
    ]


def prompts_of(served: Case) -> list[list[int]]:
    """Prompts that begin alike, some at page borders."""
    bases = [served.tokens(300, seed=seed) for seed in (1, 2)]
    lengths = [1, 6, 40, 127, 129, 140, 258, 290]
    return [bases[0][:length] for length in lengths] + [bases[1][:length] for length in (3, 128, 200, 257)]


@pytest.mark.parametrize(
    ("device", "seed"), [("cpu", 0), *(pytest.param("cuda", seed, marks=pytest.mark.gpu) for seed in range(10))]
)
def test_random_schedules(device: str, seed: int) -> None:
    """Requests come at random; pages run short; prefixes are shared; nothing is lost, and every token is right."""
    served = case("small", device)
    prompts, rng = prompts_of(served), np.random.default_rng(seed)
    engines = scheduled_engines(device)
    sizes: set[int] = set()
    for schedule in range(SCHEDULES):
        engine = engines[schedule % len(engines)]
        coming = sorted(rng.integers(12, size=rng.integers(1, 9)).tolist())
        requests, step = [], 0
        while True:
            while coming and coming[0] <= step:
                coming.pop(0)
                prompt = prompts[rng.integers(len(prompts))]
                requests.append(engine.add(prompt, int(rng.integers(1, 13))))
            done = engine.step()
            if done is None and not coming:
                break
            sizes.add(len(engine.scheduler.running))
            step += 1
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting
        assert served.check(engine, requests) == 0, schedule
        engine.backend.check()
    assert sizes >= {0, 1, 2, 3, 4}
    assert sum(engine.scheduler.hit_tokens for engine in engines) > 0
    assert sum(engine.scheduler.put_back for engine in engines) > 0


@each_device
@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_verified_drafts_change_nothing(device: str, drafts: int, ragged: bool) -> None:
    served = case("small", device)
    engine = served.engine(max_requests=3, max_len=320, chunk_size=100, drafts=drafts, ragged=ragged)
    engine.speculation = Guesses(served, drafts)
    requests = [engine.add(prompt, 12) for prompt in prompts_of(served)]
    engine.run()
    assert served.check(engine, requests) == 0
    assert set(engine.statistics.accepted) == set(range(1, drafts + 2))
    assert engine.statistics.tokens == 12 * len(requests)
    verified = engine.statistics.steps[ForwardMode.TARGET_VERIFY.value]
    assert (engine.statistics.bucket_steps < verified) == ragged


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_host_waits_for_tokens_alone(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served = case("small", "cuda")
    engine = served.engine(max_requests=3, chunk_size=64, drafts=drafts)
    engine.speculation = Guesses(served, drafts)
    prompts = [served.tokens(length, seed=length) for length in (3, 150, 40)]
    for prompt in prompts:
        served.reference(prompt, 12)
    requests = [engine.add(prompt, 12) for prompt in prompts]
    engine.step()  # what a first step loads and compiles may wait
    reading = engine.statistics.timed

    def timed(part: str):  # type: ignore[no-untyped-def]
        torch.cuda.set_sync_debug_mode("error" if part in ("schedule", "upload", "model", "commit") else "default")
        return reading(part)

    monkeypatch.setattr(engine.statistics, "timed", timed)
    try:
        engine.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert served.check(engine, requests) == 0


def test_warm_up_is_forgotten() -> None:
    served = case("small", "cpu")
    for max_len, chunk_size in ((2, 64), (3, 64), (300, 64)):
        engine = served.engine(max_requests=2, max_len=max_len, chunk_size=chunk_size)
        warm_up(engine)
        assert not engine.statistics.steps
        request = engine.add(served.tokens(1), max_len - 1)
        engine.run()
        assert served.check(engine, [request]) == 0
        assert engine.statistics.tokens == max_len - 1


def test_metadata_kernels_are_named() -> None:
    modules = [import_module(f"dsv4_triton_kernels.{name}") for name in ("metadata", "planner", "planner_chunked")]
    names = {name for module in modules for name in vars(module) if re.fullmatch(r"_(build|plan)\w*_kernel", name)}
    assert names == set(METADATA_KERNELS)


@pytest.mark.parametrize(("max_len", "samples"), [(300, 5), (40, 0)])
def test_steps_of_all_requests_are_measured(max_len: int, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little room early requests end before the last prompt does; then there is nothing to measure."""
    engine = case("small", "cpu").engine(max_requests=6, max_len=max_len, chunk_size=16)
    sizes: list[int] = []

    def kernel_us(step: Callable[[], object], names: object) -> float:
        sizes.append(len(engine.scheduler.running))
        before = engine.statistics.bucket_steps
        step()
        assert engine.statistics.bucket_steps == before + 1
        return 1.0

    monkeypatch.setattr(measure, "kernel_us", kernel_us)
    assert metadata_us(engine) == [1.0] * samples
    assert sizes == [6] * samples
    assert not engine.scheduler.running


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_metadata_in_a_graph_takes_little(drafts: int) -> None:
    served = case("small", "cuda")
    engine = served.engine(max_requests=64, chunk_size=512, drafts=drafts)
    engine.speculation = Guesses(served, drafts)
    warm_up(engine)
    assert not engine.statistics.tokens
    samples = metadata_us(engine)
    assert len(samples) == 5
    assert 0 < samples[0] <= 10  # the least: other tests may keep the GPU busy


def test_comparison_goes_on_where_logits_are_close() -> None:
    prompt, tokens = [5], [1, 2, 3, 4]
    asked = []

    def generate(prompt: list[int], count: int) -> list[int]:
        asked.append((prompt, count))
        return tokens[-count:]

    close = Reference(prompt, tokens, [1.0, 1e-5, 1.0, 1.0])
    assert list(compare(close, tokens, generate)) == []  # type: ignore[arg-type]
    (found,) = compare(close, [1, 9, 9, 9], generate)  # type: ignore[arg-type]
    assert (found.index, found.expected, found.got, found.is_close) == (1, 2, 9, True)
    assert asked == [([5, 1, 2], 2)]
    (found,) = compare(close, [1, 2, 9, 9], generate)  # type: ignore[arg-type]
    assert (found.index, found.is_close) == (2, False)
    assert len(asked) == 1
    with pytest.raises(ValueError, match="output: expected 4 tokens, got 3"):
        list(compare(close, [1, 2, 3], generate))  # type: ignore[arg-type]


def test_engine_refusals() -> None:
    served = case("small")
    for options, message in (
        ({"max_requests": 0}, "max_requests: expected an int of at least 1, got 0"),
        ({"max_len": 4096}, "max_len: expected at most 2048, got 4096"),
        ({"chunk_size": 0}, "chunk_size: expected an int of at least 1, got 0"),
        ({"drafts": 10}, "num_draft_tokens: expected at most 10, got 11"),
        ({"kv": "int4"}, "format: expected one of"),
        ({"executor": "graph"}, "executor: expected"),
        ({"size": 3}, "size: expected a CacheSize, got int"),
    ):
        with pytest.raises(ValueError, match=message):
            served.engine(**options)  # type: ignore[arg-type]
    engine = served.engine()
    for prompt, new, message in (
        ([], 3, "prompt: expected at least one token, got none"),
        ([256], 3, "prompt: expected tokens from 0 to 255, got 256 to 256"),
        ([1], 0, "max_new_tokens: expected an int of at least 1, got 0"),
        ([1], 2.5, "max_new_tokens: expected an int of at least 1, got 2.5"),
        ([1.5], 3, "prompt: expected a sequence of integers, got list: 'float' object cannot be interpreted"),
        ("hello", 3, "prompt: expected a sequence of integers, got str"),
        (None, 3, "prompt: expected a sequence of integers, got NoneType"),
        ([1] * 400, 200, "prompt: expected at most max_len = 400 tokens with those to generate, got 400 and 200"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add(prompt, new)
    assert engine.step() is None


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["generate", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("drafts", [0, 2])
def test_command(drafts: int) -> None:
    code, output = run(
        "--requests", "3", "--max-new-tokens", "6", "--drafts", str(drafts), "--check", "--device", "cpu"
    )
    assert code == 0, output
    assert "tiny, kv fp32, impl torch, executor eager on cpu" in output
    assert re.search(r"\d+ tokens in [\d.]+ s: \d+ tokens/s", output)
    assert "3 of 3 requests have Hugging Face's tokens" in output
    assert ("acceptance length" in output) == (drafts > 0)
    for part in ("schedule", "upload", "model", "read", "commit", *(["draft"] if drafts else [])):
        assert re.search(rf"^ ?{part} +[\d.]+ +[\d.]+%", output, re.MULTILINE), part


def test_command_says_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_examples.hf_dsv4 import model

    right = model.FlatModel.logits
    monkeypatch.setattr(model.FlatModel, "logits", lambda self, hidden: -right(self, hidden))
    code, output = run("--requests", "2", "--max-new-tokens", "2", "--check", "--device", "cpu")
    assert code == 1
    assert re.search(r"DIFF request 0, token 0: Hugging Face \d+, here \d+; its two best logits are", output)
    assert "0 of 2 requests have Hugging Face's tokens" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "big"), "--config: expected one of tiny, flash-dims, got 'big'"),
        (("--kv", "int4"), "--kv: expected one of fp32, bf16, fp8, got 'int4'"),
        (("--kv", "fp8", "--check"), "--check: expected --kv fp32, since a rounded cache gives tokens of its own"),
        (("--requests", "0"), "--requests: expected at least 1, got 0"),
        (("--max-running", "0"), "--max-running: expected at least 1, got 0"),
        (("--drafts", "-1"), "--drafts: expected at least 0, got -1"),
        (("--seed", "-1"), "--seed: expected at least 0, got -1"),
        (("--drafts", "10"), "num_draft_tokens: expected at most 10, got 11"),
        (("--draft-window", "all"), "--draft-window: expected one of growing, frozen, got 'all'"),
        (("--executor", "graph"), "executor: expected"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, tuple) else "",
)
def test_command_refusals(arguments: tuple[str, ...], message: str) -> None:
    code, output = run(*arguments, "--device", "cpu")
    assert code == 2
    assert message in output


def test_command_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_backend import installed

    for version in (None, "5.4.0", "4.57"):
        monkeypatch.setattr(installed, "version", lambda name, found=version: found)
        code, output = run("--device", "cpu")
        assert code == 2
        assert f"transformers: expected version 5.17 or newer, got {version or 'none'}; install it with" in output


@pytest.mark.parametrize("source", blocks(ROOT / "docs" / "generate.md", "python"))
def test_the_page_runs(source: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[") == 3


def test_command_says_what_it_runs_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_examples.hf_dsv4 import serving

    def stop(*arguments: object) -> None:
        raise SystemExit(7)

    monkeypatch.setattr(serving, "serve", stop)
    code, output = run("--requests", "2", "--device", "cpu")
    assert code == 7
    assert output == "tiny, kv fp32, impl torch, executor eager on cpu\n"


def test_command_says_how_far_it_is_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_backend.commands import generate

    plain_lines = generate.plain_lines
    monkeypatch.setattr(generate, "plain_lines", lambda what, every: plain_lines(what, 0.0))
    result = CliRunner().invoke(
        app, ["generate", "--requests", "2", "--max-new-tokens", "2", "--check", "--device", "cpu"]
    )
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert re.fullmatch(r"generate: 0 of 2 requests, \d tokens", lines[0])
    assert re.fullmatch(r"generate: 2 of 2 requests, \d tokens", lines[-3])
    assert lines[-2:] == ["check: 1 of 2 requests", "check: 2 of 2 requests"]
    assert "requests, " not in result.stdout.split("part of a step")[0].split("tokens/s")[0]
