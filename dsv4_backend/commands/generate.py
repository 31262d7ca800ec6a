"""`dsv4 generate`: a small DeepSeek-V4 with random weights, end to end, and whether its tokens are Hugging Face's."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsv4_backend.commands.common import DeviceOption, ImplOption, clean_errors, pick_device, plain_lines
from dsv4_backend.dispatch import resolve_impl
from dsv4_backend.installed import check_transformers
from dsv4_backend.layouts import FORMATS
from dsv4_backend.metadata_builder import DRAFT_WINDOWS

if TYPE_CHECKING:
    from transformers import DeepseekV4ForCausalLM

    from dsv4_examples.hf_dsv4.engine import Engine
    from dsv4_examples.hf_dsv4.scheduler import Request


def generate(
    config: Annotated[str, typer.Option(help="Model: tiny, or flash-dims with V4-Flash's head dimensions.")] = "tiny",
    requests: Annotated[int, typer.Option(help="Requests, which arrive over time.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens that a request generates.")] = 32,
    drafts: Annotated[int, typer.Option(help="Drafts of a request in a verify step; 0: plain decode.")] = 0,
    draft_window: Annotated[str, typer.Option(help="Window of the draft steps: growing or frozen.")] = "growing",
    max_running: Annotated[int, typer.Option(help="Requests that run at a time.")] = 4,
    chunk_size: Annotated[int, typer.Option(help="Prompt tokens of a step.")] = 128,
    kv: Annotated[str, typer.Option(help="Format of the cache: fp32, bf16 or fp8.")] = "fp32",
    check: Annotated[bool, typer.Option("--check", help="Compare with Hugging Face's own greedy tokens.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and arrivals.")] = 0,
    executor: Annotated[str, typer.Option(help="auto, cuda_graph, or eager (no graphs, on a CPU too).")] = "auto",
    impl: ImplOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Run a small DeepSeek-V4 of transformers with this attention: chunked prefill, batched decode, drafts.

    Exit code 1: with --check, tokens differ from those that Hugging Face generates, one sequence at a time. Where its
    two best logits are less than 1e-4 apart, the run goes on with its token. 2: bad input.
    """
    with clean_errors():
        where = pick_device(device)
        chosen = resolve_impl(impl, where)
        _check_numbers(requests=requests, max_new_tokens=max_new_tokens, max_running=max_running, chunk_size=chunk_size)
        _check_choice("--kv", kv, FORMATS)
        _check_choice("--draft-window", draft_window, DRAFT_WINDOWS)
        if seed < 0:
            raise ValueError(f"--seed: expected at least 0, got {seed}")
        if drafts < 0:
            raise ValueError(f"--drafts: expected at least 0, got {drafts}")
        if check and kv != "fp32":
            raise ValueError(f"--check: expected --kv fp32, since a rounded cache gives tokens of its own, got {kv}")
        check_transformers()
        from dsv4_examples.hf_dsv4.configs import CONFIGS

        _check_choice("--config", config, tuple(CONFIGS))
        example = CONFIGS[config]
        geom = example.geometry(1 + drafts if drafts else 0)
    from dsv4_examples.hf_dsv4.engine import Engine
    from dsv4_examples.hf_dsv4.measure import metadata_us, warm_up
    from dsv4_examples.hf_dsv4.model import FlatModel
    from dsv4_examples.hf_dsv4.serving import make_jobs, serve

    jobs = make_jobs(
        requests,
        vocabulary=example.sizes["vocab_size"],
        prompts=example.prompts,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    with clean_errors():
        hf = example.build(seed, where)
        engine = Engine(
            FlatModel.from_hf(hf, impl=chosen),
            geom=geom,
            max_requests=min(max_running, requests),
            max_len=example.prompts[1] + max_new_tokens,
            chunk_size=chunk_size,
            kv=kv,
            num_drafts=drafts,
            executor=executor,
        )
        if drafts:
            _speculate(engine, example.draft_layers, draft_window, executor)
    console = Console(highlight=False, soft_wrap=True)
    title = f"{config}, kv {kv}, impl {chosen}, executor {engine.executor} on {where}"
    console.print(title, markup=False)
    engine.capture()
    if where.type == "cuda":
        warm_up(engine)
    with _bar("generate", len(jobs)) as advance:
        start = time.perf_counter()
        served = serve(engine, jobs, lambda done, tokens: advance(done, f"{tokens:,} tokens"))
        seconds = time.perf_counter() - start
    _print_report(console, engine, seconds)
    different = check and not _same_tokens(console, hf, engine, served)
    if engine.executor == "cuda_graph" and (samples := metadata_us(engine)):
        spent, size = statistics.median(samples), engine.max_requests
        console.print(f"metadata and plans of a step of {size:,} requests: {spent:.1f} us of GPU time in its graph")
    if different:
        raise typer.Exit(1)


def _speculate(engine: Engine, layers: int, draft_window: str, executor: str) -> None:
    from dsv4_examples.hf_dsv4.speculation import Speculator

    speculator = Speculator.of_first_layers(engine, layers, draft_window=draft_window, executor=executor)
    speculator.capture()
    engine.speculation = speculator


def _check_numbers(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Gives a call that takes how many requests are done, and a note: a bar on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        say = plain_lines(what, every=5.0)
        yield lambda done, note: say(f"{done:,} of {total:,} requests{note and ', '}{note}")
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests {task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def _print_report(console: Console, engine: Engine, seconds: float) -> None:
    found, scheduler = engine.statistics, engine.scheduler
    steps = found.steps.total()
    kinds = ", ".join(f"{count:,} {mode}" for mode, count in found.steps.items())
    console.print(f"{found.tokens:,} tokens in {seconds:.2f} s: {found.tokens / seconds:,.0f} tokens/s")
    console.print(f"{steps:,} steps ({kinds}), {found.rows:,} rows; {found.bucket_steps:,} in buckets")
    console.print(
        f"{scheduler.hit_tokens:,} prompt tokens from the prefix cache, {scheduler.put_back:,} requests put back"
    )
    if found.accepted:
        counts = ", ".join(f"{length}: {found.accepted[length]:,}" for length in sorted(found.accepted))
        console.print(f"acceptance length {found.acceptance_length:.2f} of {1 + engine.num_drafts} ({counts})")
    table = Table("part of a step", box=None)
    table.add_column("ms a step", justify="right")
    table.add_column("share", justify="right")
    whole = sum(found.seconds.values())
    for part, spent in found.seconds.items():
        table.add_row(part, f"{spent / steps * 1e3:.3f}", f"{spent / whole:.1%}")
    console.print(table)


def _same_tokens(console: Console, hf: DeepseekV4ForCausalLM, engine: Engine, served: list[Request]) -> bool:
    """Prints where tokens differ from Hugging Face's, and returns whether none do but by rounding."""
    from dsv4_examples.hf_dsv4.reference import CLOSE, compare, generate_with_hugging_face

    def again(prompt: Sequence[int], count: int) -> Sequence[int]:
        request = engine.add(prompt, count)
        engine.run()
        return request.output

    same = close = 0
    with _bar("check", len(served)) as advance:
        for index, request in enumerate(served):
            prompt = request.tokens[: request.prompt_length]
            reference = generate_with_hugging_face(hf, prompt, request.max_new_tokens)
            differs = False
            for found in compare(reference, request.output, again):
                what = f"request {index}, token {found.index}: Hugging Face {found.expected}, here {found.got}"
                if found.is_close:
                    close += 1
                    console.print(f"{what}; its two best logits are {found.gap:.1e} apart: going on with its token")
                else:
                    differs = True
                    typer.echo(f"DIFF {what}; its two best logits are {found.gap:.1e} apart", err=True)
            same += not differs
            advance(index + 1, "")
    note = f"; {close:,} tokens where logits are less than {CLOSE:g} apart" if close else ""
    console.print(f"{same:,} of {len(served):,} requests have Hugging Face's tokens{note}")
    return same == len(served)
