"""A small model with its plain greedy tokens, and drafts that are right exactly as far as a test wants."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dsv4_backend import CacheSize
from dsv4_backend.layouts import EntryPool
from dsv4_backend.reference.kv_store import load_entries, store_entries
from dsv4_examples.hf_dsv4.configs import CONFIGS
from dsv4_examples.hf_dsv4.engine import Engine
from dsv4_examples.hf_dsv4.model import FlatModel
from dsv4_examples.hf_dsv4.scheduler import Request, Step
from dsv4_examples.hf_dsv4.speculation import Speculator

LONGEST = 30
"""Tokens that are known of each prompt's continuation."""
LENGTHS = (1, 2, 3, 4, 5, 7, 30, 32, 33, 61, 118, 123, 126, 127, 128, 129, 200, 250)
"""Prompts around groups of 4 and 128 tokens, and around pages: of 128 tokens, and of 32 in the window pool."""


class World:
    """A model of a few layers on a device, and what it generates without drafts.

    Args:
        ratios: of its layers.
        draft_layers: how many of them make the draft.
        lengths: of the prompts, whose tokens are random.
    """

    def __init__(
        self, impl: str, device: str, ratios: Sequence[int], draft_layers: int, lengths: Sequence[int] = LENGTHS
    ) -> None:
        tiny = CONFIGS["tiny"]
        sizes = {**tiny.sizes, "num_hidden_layers": len(ratios), "compress_ratios": list(ratios)}
        self.example = replace(tiny, sizes=sizes, draft_layers=draft_layers)
        self.device, self.vocabulary = device, sizes["vocab_size"]
        self.hf = self.example.build(seed=1, device=device)
        self.model = FlatModel.from_hf(self.hf, impl=impl)
        rng = random.Random(2)
        self.prompts = [[rng.randrange(self.vocabulary) for _ in range(length)] for length in lengths]
        self.plain = self.serve(self.engine(0), self.prompts, [LONGEST] * len(self.prompts))

    def engine(
        self,
        num_drafts: int,
        *,
        window: str = "growing",
        ragged: bool = False,
        kv: str = "fp32",
        max_requests: int = len(LENGTHS),
        size: CacheSize | None = None,
        chunk_size: int = 1500,
        captured: bool = True,
    ) -> Engine:
        """An engine with drafts from the model's first layers; both run in buckets if `captured`."""
        engine = Engine(
            self.model,
            geom=self.example.geometry(num_drafts and num_drafts + 1),
            max_requests=max_requests,
            max_len=max(LENGTHS) + LONGEST,
            chunk_size=chunk_size,
            kv=kv,
            num_drafts=num_drafts,
            ragged=ragged,
            size=size,
        )
        if num_drafts:
            speculator = Speculator.of_first_layers(engine, self.example.draft_layers, draft_window=window)
            engine.speculation = speculator
            if captured:
                speculator.capture()
        if captured:
            engine.capture()
        return engine

    @staticmethod
    def serve(engine: Engine, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        """The tokens generated for each prompt, as many as `counts` says."""
        requests = [engine.add(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
        engine.run()
        return [request.output for request in requests]

    def known(self, counts: Sequence[int]) -> list[list[int]]:
        """What `serve` must return."""
        return [tokens[:count] for tokens, count in zip(self.plain, counts, strict=True)]


class Watched:
    """Stands between an engine and its speculator, and keeps what it sees.

    Attributes:
        steps: rows of each request, for every verify step.
        drafts: what was proposed, for every verify step.
    """

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.speculation, Speculator)
        self.engine, self.speculator = engine, engine.speculation
        self.steps: list[tuple[int, ...]] = []
        self.drafts: list[list[list[int]]] = []
        engine.speculation = self

    def propose(self, step: Step) -> torch.Tensor:
        self.steps.append(tuple(step.rows))
        drafts = self.change(step, self.speculator.propose(step).clone())
        self.drafts.append(drafts.tolist())
        return drafts

    def change(self, step: Step, drafts: torch.Tensor) -> torch.Tensor:
        return drafts

    def window_slots(self, step: Step) -> torch.Tensor:
        tables = self.engine.backend.tables
        return tables.full_to_swa[torch.as_tensor(step.slots, device=tables.device).long()]


class Poisoned(Watched):
    """Fills with NaN all that the cache has of a step's tokens: of rejected drafts before the draft runs, and of what
    the draft has stored before the target runs.

    Whoever reads what nobody stored in this step, or what only the draft stored, gets NaN and other tokens.
    """

    def propose(self, step: Step) -> torch.Tensor:
        self.poison(step)
        drafts = super().propose(step)
        self.poison(step)
        return drafts

    def poison(self, step: Step) -> None:
        backend, geom = self.engine.backend, self.engine.backend.geom
        slots = torch.as_tensor(step.slots, device=self.engine.device).long()
        window = self.window_slots(step)
        rows = torch.tensor(step.rows, device=slots.device)
        starts = torch.tensor(step.before, device=slots.device)
        request = torch.tensor([each.row for each in step.requests], device=slots.device).repeat_interleave(rows)
        first = (rows.cumsum(0) - rows).repeat_interleave(rows)
        positions = starts.repeat_interleave(rows) + torch.arange(len(slots), device=slots.device) - first
        for layer in backend.cache.layers:
            _fill(layer.window, window)
            closing = slots[(positions + 1) % max(1, layer.ratio) == 0] // max(1, layer.ratio)
            for pool in (layer.compressed, layer.index_keys):
                if pool is not None:
                    _fill(pool, closing)
            for state in (layer.state, layer.index_state):
                if state is not None:
                    state[geom.state_loc(layer.ratio, window, request, positions)] = torch.nan


class Forced(Poisoned):
    """Poisoned, with drafts of which exactly as many are right as `choose` says.

    Args:
        engine: the engine.
        truth: tokens that follow each prompt.
        choose: the number of right drafts of a request, from 0 to as many as it verifies, which is the argument; the
            other one is `chosen`.

    Attributes:
        chosen: how often each number of right drafts was chosen.
    """

    def __init__(
        self, engine: Engine, truth: Callable[[Request], Sequence[int]], choose: Callable[[int, Counter[int]], int]
    ) -> None:
        super().__init__(engine)
        self.truth, self.choose = truth, choose
        self.chosen: Counter[int] = Counter()

    def change(self, step: Step, drafts: torch.Tensor) -> torch.Tensor:
        vocabulary = self.engine.model.hf.config.vocab_size
        made = drafts.tolist()
        for lane, request, rows in zip(made, step.requests, step.rows, strict=True):
            coming = self.truth(request)[len(request.output) :]
            right = self.choose(rows - 1, self.chosen)
            lane[:right] = coming[:right]
            if right < len(lane):
                lane[right] = (coming[right] + 1) % vocabulary
            self.chosen[right] += 1
        return torch.tensor(made, device=drafts.device)


def truth_of(world: World) -> Callable[[Request], Sequence[int]]:
    """Finds a request's continuation by its prompt."""
    known = {tuple(prompt): tokens for prompt, tokens in zip(world.prompts, world.plain, strict=True)}
    return lambda request: known[tuple(request.tokens[: request.prompt_length])]


def entries(engine: Engine, layer: int, slots: torch.Tensor) -> torch.Tensor:
    """float32 [n, head_dim]: a layer's window entries."""
    return load_entries(engine.backend.cache.layers[layer].window, slots)


def _fill(pool: EntryPool, slots: torch.Tensor) -> None:
    values = torch.full((len(slots), pool.layout.head_dim), torch.nan, device=slots.device)
    store_entries(values=values, slots=slots, pool=pool)
