"""An engine: requests in, tokens out; the device is read once a step, for its tokens."""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from dsv4_backend import AttnMetadata, CacheGeometry, CacheSize, DSV4AttnBackend, DSV4Cache, ForwardMode, RawBatch
from dsv4_backend.page_pool import PagePool
from dsv4_backend.table_mirror import TableMirror
from dsv4_backend.transfer import send
from dsv4_backend.validation import INT_DTYPES, expect_tensor, expect_type
from dsv4_examples.hf_dsv4.model import FlatModel
from dsv4_examples.hf_dsv4.scheduler import Request, Scheduler, Step
from dsv4_graph_runner import BucketPolicy, StepGraphRunner


class Speculation(Protocol):
    """What the engine asks of drafts."""

    def propose(self, step: Step) -> torch.Tensor:
        """int64 [B, num_drafts], on the engine's device: the tokens that will follow each request's last one.

        The step is a TARGET_VERIFY that has not run yet; the request tables on the device have its slots.
        """
        ...


@dataclass
class Statistics:
    """What was done so far.

    Attributes:
        seconds: host time by part of a step. "read" waits for the device, so on a GPU it has the model's time, too.
        steps: by mode.
        bucket_steps: steps that ran in a bucket of the graph runner, padded; on a GPU in a graph.
        rows: rows that were computed.
        tokens: tokens that were generated.
        accepted: how often a verify step gave a request 1, 2, .. tokens.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    bucket_steps: int = 0
    rows: int = 0
    tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens that a verify step gave a request; 0 where there was none."""
        count = self.accepted.total()
        return sum(length * times for length, times in self.accepted.items()) / count if count else 0.0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


class Engine:
    """Serves requests greedily on a model.

    Args:
        model: the model. Its attention says which implementation runs, its device where.
        geom: cache geometry; its window is the model's.
        max_requests: requests that run at a time; others wait.
        max_len: longest request, all that it generates included.
        chunk_size: prompt rows of a step.
        kv: format of the cache: "fp32", "bf16" or "fp8".
        num_drafts: drafts of a request in a verify step; 0: none, and no speculation is asked.
        ragged: a request verifies no more drafts than it has tokens left to generate; a step with such a request runs
            without a graph. Else all requests verify all drafts.
        executor: of the steps after the prompts: "cuda_graph", "eager", or "auto": graphs on a GPU.
        size: room of the cache; None: as much as `max_requests` of the longest requests need.

    Attributes:
        speculation: makes the drafts; to be set before the first step if `num_drafts` is not 0.
        scheduler, backend, statistics: as the names say.
        max_requests, max_len, chunk_size, num_drafts: as given.

    Raises:
        ValueError: an argument is not as above, or does not go with the model.
    """

    def __init__(
        self,
        model: FlatModel,
        *,
        geom: CacheGeometry,
        max_requests: int,
        max_len: int,
        chunk_size: int,
        kv: str = "fp32",
        num_drafts: int = 0,
        ragged: bool = False,
        executor: str = "auto",
        size: CacheSize | None = None,
    ) -> None:
        expect_type("model", model, FlatModel)
        expect_type("geom", geom, CacheGeometry)
        if size is not None:
            expect_type("size", size, CacheSize)
        for name, value, low in (
            ("max_requests", max_requests, 1),
            ("max_len", max_len, 2),
            ("chunk_size", chunk_size, 1),
            ("num_drafts", num_drafts, 0),
        ):
            if type(value) is not int or value < low:
                raise ValueError(f"{name}: expected an int of at least {low}, got {value!r}")
        if num_drafts:
            geom.check_drafts(1 + num_drafts)
        longest = max_len + num_drafts
        if longest > model.cfg.max_position:
            raise ValueError(f"max_len: expected at most {model.cfg.max_position - num_drafts}, got {max_len}")
        self.model, self.num_drafts, self.device = model, num_drafts, model.device
        self.max_requests, self.max_len, self.chunk_size = max_requests, max_len, chunk_size
        size = size or CacheSize.for_requests(
            model.cfg, geom, num_requests=max_requests, max_seq_len=longest, chunk_size=chunk_size + max_requests
        )
        pool = PagePool(
            page_size=geom.page_size,
            window_page_size=geom.swa_page_size,
            num_pages=size.num_pages - 1,
            num_window_pages=size.num_window_pages - 1,
            max_requests=max_requests,
            max_len=longest,
        )
        self._mirror = TableMirror(pool, self.device)
        self.scheduler = Scheduler(
            pool, window=geom.window, chunk_size=chunk_size, num_drafts=num_drafts, uniform=not ragged
        )
        cache = DSV4Cache(model.cfg, geom, size, format=kv, device=self.device)
        self.backend = DSV4AttnBackend(
            model.cfg,
            geom,
            cache,
            self._mirror.tables,
            impl=model.impl,
            max_rows=chunk_size + max_requests * (1 + num_drafts),
        )
        self._runner = StepGraphRunner(
            lambda ids, meta: (self._next_tokens(ids, meta),),
            self.backend,
            mode=ForwardMode.TARGET_VERIFY if num_drafts else ForwardMode.DECODE,
            width=1 + num_drafts,
            buckets=BucketPolicy(max_requests),
            device=self.device,
            executor=executor,
        )
        self.speculation: Speculation | None = None
        self.statistics = Statistics()

    @property
    def executor(self) -> str:
        """ "cuda_graph" or "eager"."""
        return self._runner.executor

    def capture(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Records the steps after the prompts, for each bucket of batch sizes. Without it they run without graphs.

        Args:
            progress: called with (done, total, what).

        Raises:
            GuardError: a graph cannot have what the model does, such as experts that wait for the device. Transformers'
                "batched_mm" is a way of running them that does not.
        """
        self._runner.capture(progress)

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> Request:
        """Queues a request. Requests may come at any time, between steps.

        Args:
            prompt: integers, at least one, of the model's vocabulary.
            max_new_tokens: tokens to generate, at least 1; with the prompt at most `max_len`.

        Raises:
            ValueError: an argument is not as above, or as `Scheduler.add`; nothing is queued then.
        """
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(
                f"prompt: expected a sequence of integers, got {type(prompt).__name__}: {error}"
            ) from error
        vocabulary = self.model.hf.config.vocab_size
        if any(not 0 <= token < vocabulary for token in tokens):
            raise ValueError(f"prompt: expected tokens from 0 to {vocabulary - 1}, got {min(tokens)} to {max(tokens)}")
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected an int of at least 1, got {max_new_tokens!r}")
        if len(tokens) + max_new_tokens > self.max_len:
            raise ValueError(
                f"prompt: expected at most max_len = {self.max_len} tokens with those to generate, got {len(tokens)} "
                f"and {max_new_tokens}"
            )
        return self.scheduler.add(tokens, max_new_tokens)

    def step(self) -> list[Request] | None:
        """Runs one step. Returns the requests that it finished; None when there is nothing left to do.

        The engine can go on after any exception in it: the step's requests then compute all of their tokens again.

        Raises:
            RuntimeError: there is no speculation for the drafts that are wanted.
            ValueError: the speculation's drafts are not int32 or int64 [B, num_drafts] on the device.
        """
        with self.statistics.timed("schedule"):
            step = self.scheduler.next_step()
        if step is None:
            return None
        try:
            tokens = self._run(step)
            with self.statistics.timed("commit"):
                self._count(step, tokens)
                return self.scheduler.commit(step, tokens)
        except BaseException:
            self.scheduler.abandon(step)
            raise

    def _run(self, step: Step) -> list[list[int]]:
        """For each request of a step the tokens that it goes on with."""
        timed = self.statistics.timed
        with timed("upload"):
            self._mirror.refresh()
        drafts = None
        if step.mode is ForwardMode.TARGET_VERIFY:
            if self.speculation is None:
                raise RuntimeError("speculation: expected one to be set, since num_drafts is not 0")
            with timed("draft"):
                drafts = self.speculation.propose(step)
            self._check_drafts(drafts, len(step.requests))
        with timed("upload"):
            batch, ids, chosen = self._upload(step, drafts)
        with timed("model"):
            if chosen is None:
                out = self._runner.replay(batch, ids)
                (next_tokens,) = out.tensors
                self.statistics.bucket_steps += out.fallback_reason is None
            else:
                next_tokens = self._next_tokens(ids, self.backend.prepare(batch), chosen)
        with timed("read"):  # the only place where the host waits
            read = next_tokens.tolist() if drafts is None else torch.cat((next_tokens, ids)).tolist()
        return _accept(step, read)

    def run(self) -> None:
        """Steps until all requests are finished."""
        while self.step() is not None:
            pass

    def _next_tokens(self, ids: torch.Tensor, meta: AttnMetadata, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """The greedy tokens behind the rows in `chosen`; None: behind all."""
        layers, attend = self.model.layers, self.backend.attend
        hidden = self.model.hidden(ids, lambda index, x: attend(index, layers[index], x, meta))
        return self.model.logits(hidden if chosen is None else hidden[chosen]).argmax(dim=1)

    def _check_drafts(self, drafts: object, batch_size: int) -> None:
        found = expect_tensor("drafts", drafts, dtypes=INT_DTYPES, ndim=2, size=batch_size, device=self.device)
        if found.shape[1] != self.num_drafts:
            raise ValueError(f"drafts: expected {self.num_drafts} columns, got {found.shape[1]}")

    def _upload(self, step: Step, drafts: torch.Tensor | None) -> tuple[RawBatch, torch.Tensor, torch.Tensor | None]:
        """The step's batch and tokens, and the rows to read tokens of (None: all), in one copy to the device."""
        before, rows = np.array(step.before), np.array(step.rows)
        verify = step.mode is ForwardMode.TARGET_VERIFY
        known = [
            request.tokens[start : start + (1 if verify else count)]
            for request, start, count in zip(step.requests, step.before, step.rows, strict=True)
        ]
        parts: dict[str, np.ndarray] = {
            "req_pool_indices": np.array([request.row for request in step.requests]),
            "seq_lens": before if verify else before + rows,
            "out_cache_loc": step.slots,
            "ids": np.concatenate(known),
        }
        if verify:  # which of [last token, drafts] of all requests are rows
            width = 1 + self.num_drafts
            column = np.arange(width)
            parts["picked"] = (np.arange(len(rows))[:, None] * width + column)[column < rows[:, None]]
        ragged = step.mode is ForwardMode.EXTEND or (verify and len(set(step.rows)) > 1)
        if ragged:
            parts["extend_lens"] = rows
        if step.mode is ForwardMode.EXTEND:
            parts["chosen"] = step.last_rows
        on_device: dict[str, Any] = self._to_device(parts)
        ids = on_device.pop("ids")
        if verify:
            assert drafts is not None
            # What is no token counts as another one, so that nothing is looked up outside of the vocabulary.
            drafts = drafts.clamp(0, self.model.hf.config.vocab_size - 1)
            ids = torch.cat((ids[:, None], drafts), dim=1).flatten()[on_device.pop("picked")]
        chosen = on_device.pop("chosen", None)
        drafted = max(step.rows) if verify else 0
        return RawBatch(step.mode, **on_device, num_draft_tokens=drafted), ids, chosen

    def _to_device(self, parts: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        packed = send(torch.from_numpy(np.concatenate(list(parts.values())).astype(np.int64)), self.device)
        return dict(zip(parts, packed.split([len(part) for part in parts.values()]), strict=True))

    def _count(self, step: Step, tokens: Sequence[Sequence[int]]) -> None:
        found = self.statistics
        found.steps[step.mode.value] += 1
        found.rows += len(step.slots)
        for request, new in zip(step.requests, tokens, strict=True):
            found.tokens += min(len(new), request.remaining)
            if step.mode is ForwardMode.TARGET_VERIFY:
                found.accepted[len(new)] += 1


def _accept(step: Step, read: list[int]) -> list[list[int]]:
    """For each request the tokens that it goes on with.

    Args:
        step: the step.
        read: B next tokens, of each request's last row; in a verify step next tokens of all T rows, then the T rows'
            own.
    """
    if step.mode is not ForwardMode.TARGET_VERIFY:
        ends = zip(step.requests, step.before, step.rows, read, strict=True)
        return [[token] if start + rows == len(each.tokens) else [] for each, start, rows, token in ends]
    found, first, total = [], 0, len(step.slots)
    for rows in step.rows:
        following, own = read[first : first + rows], read[total + first : total + first + rows]
        kept = 1  # the last token is the request's own
        while kept < rows and own[kept] == following[kept - 1]:
            kept += 1
        found.append(following[:kept])
        first += rows
    return found
