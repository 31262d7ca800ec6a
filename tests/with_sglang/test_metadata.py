"""All modes: what our builder hands over equals what SGLang's own backend makes of the same batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.attention.deepseek_v4_backend as stock
import torch
from compare import differences
from harness import DRAFTS, extend_batch, forward_batch, model_runner, slots, view_of
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens

BATCHES = {
    "one": ([3], [1000]),
    "first token": ([5], [1]),
    "mixed": ([3, 1, 2, 8, 5], [1000, 128, 127, 2049, 3300]),
    "borders": ([1, 2, 3, 4, 5, 6, 7, 8], [4, 8, 129, 256, 257, 512, 3071, 3072]),
}
each_batch = pytest.mark.parametrize("case", BATCHES.values(), ids=BATCHES)


def pair(**options: Any) -> tuple[Any, Any, Any]:
    """A model runner, our backend of it and SGLang's."""
    runner = model_runner(**options)
    return runner, ATTENTION_BACKENDS["dsv4"](runner), stock.DeepseekV4AttnBackend(runner)


def addresses(metadata: Any) -> dict[str, int]:
    core = metadata.core_attn_metadata
    return {name: value.data_ptr() for name, value in vars(core).items() if isinstance(value, torch.Tensor)}


def built(backends: tuple[Any, ...], batch: Any) -> list[Any]:
    for backend in backends:
        backend.init_forward_metadata(batch)
    return [backend.forward_metadata for backend in backends]


@each_batch
@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_decode(case: tuple[list[int], list[int]], drafts: int) -> None:
    requests, lens = case
    runner, *backends = pair(drafts=drafts)
    batch = forward_batch(
        ForwardMode.DECODE, requests, lens, slots(runner, requests, [n - 1 for n in lens], [1] * len(lens))
    )
    assert differences(*built(backends, batch)) == []


PROMPTS = {
    "one": ([2], [0], [260], 0),
    "chunk": ([2], [512], [140], 0),
    "one token": ([4], [255], [1], 0),
    "mixed": ([2, 7, 1, 5], [0, 130, 1000, 3], [130, 4, 128, 1], 0),
    "padded": ([2, 7], [100, 130], [20, 11], 40),
}


@pytest.mark.parametrize("case", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_extend(case: tuple[list[int], list[int], list[int], int], drafts: int) -> None:
    runner, *backends = pair(drafts=drafts)
    batch = extend_batch(runner, *case)
    assert differences(*built(backends, batch), rows=sum(case[2])) == []


@each_batch
def test_verify(case: tuple[list[int], list[int]]) -> None:
    requests, lens = case
    runner, *backends = pair(drafts=DRAFTS)
    batch = forward_batch(
        ForwardMode.TARGET_VERIFY, requests, lens, slots(runner, requests, lens, [DRAFTS] * len(lens))
    )
    assert differences(*built(backends, batch)) == []


@each_batch
def test_draft_extend(case: tuple[list[int], list[int]]) -> None:
    requests, lens = case[0], [max(n, DRAFTS) for n in case[1]]
    runner, *backends = pair(ratios=(0,), drafts=DRAFTS, is_draft=True)
    loc = slots(runner, requests, [n - DRAFTS for n in lens], [DRAFTS] * len(lens))
    batch = forward_batch(
        ForwardMode.DRAFT_EXTEND_V2,
        requests,
        lens,
        loc,
        spec_info=SimpleNamespace(num_tokens_per_req=DRAFTS),
        extend_seq_lens=torch.full((len(lens),), DRAFTS, dtype=torch.int32),
        extend_seq_lens_cpu=[DRAFTS] * len(lens),
    )
    assert differences(*built(backends, batch)) == []


@pytest.mark.parametrize("live", [3, 4])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2])
def test_graph_replay(mode: ForwardMode, live: int) -> None:
    """Capture on padding, then a padded replay, as the graph runners go through it; addresses stay."""
    width = {ForwardMode.DECODE: 1}.get(mode, DRAFTS)
    options = dict(ratios=(0,), is_draft=True) if mode is ForwardMode.DRAFT_EXTEND_V2 else {}
    runner, *backends = pair(drafts=DRAFTS, **options)
    size = 4
    dummy = view_of(
        forward_batch(mode, [0] * size, [1] * size, torch.zeros(size * width, dtype=torch.int64)),
        spec_info=SimpleNamespace(ragged_verify_layout=None, num_tokens_per_req=width),
    )
    for backend in backends:
        backend.init_cuda_graph_state(size, size * width)
        backend.init_forward_metadata_out_graph(dummy, in_capture=True)
        backend.init_forward_metadata_in_graph(dummy)
        backend.on_after_cuda_graph_warmup()
        if mode is not ForwardMode.DRAFT_EXTEND_V2:
            assert not hasattr(backend.forward_metadata, "core_attn_metadata")  # to be built again, inside the graph
        backend.init_forward_metadata_in_graph(dummy)
    before = addresses(backends[0].forward_metadata)

    requests, lens = [3, 1, 8, 5][:live], [1000, 128, 2049, 511][:live]
    first = {ForwardMode.DECODE: -1, ForwardMode.DRAFT_EXTEND_V2: -DRAFTS}.get(mode, 0)
    loc = slots(runner, requests, [n + first for n in lens], [width] * live)
    pad = size - live
    batch = forward_batch(mode, requests + [0] * pad, lens + [1] * pad, loc)
    replay = view_of(batch, batch_size=size, spec_info=dummy.spec_info)
    # In a graph the recorded build runs on what the out-graph part left; here it is called. A draft extend has none.
    recorded = view_of(replay, out_cache_loc=torch.nn.functional.pad(loc, (0, pad * width)))
    for backend in backends:
        backend.init_forward_metadata_out_graph(replay)
        if mode is not ForwardMode.DRAFT_EXTEND_V2:
            backend.init_forward_metadata_in_graph(recorded)
    ours, theirs = (backend.forward_metadata for backend in backends)
    # Padding requests: SGLang plans them like any other, ours are left out.
    known = ("c4_compress_metadata", "c128_compress_metadata") if pad and width > 1 else ()
    # Write slots of a captured verify keep the dtype of SGLang's dummies there, int32.
    known += ("raw_out_loc",) if mode is ForwardMode.TARGET_VERIFY else ()
    assert differences(ours, theirs, rows=live * width, skip=known) == []
    assert ours.core_attn_metadata.raw_out_loc.tolist() == loc.tolist() + [0] * (pad * width)
    assert addresses(ours) == before
    again = ours.core_attn_metadata
    assert again.seq_lens_casual[live * width :].tolist() == [1] * (pad * width)
    assert again.raw_out_loc[live * width :].tolist() == [0] * (pad * width)


@pytest.mark.parametrize("verify_lens", [[3, 1, 3], [4, 4, 4], [1, 1, 1]])
def test_ragged_verify_graph(verify_lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    runner, *backends = pair(drafts=DRAFTS)
    size, rows = 4, 12
    lens = build_capture_verify_lens(num_tokens=rows, num_slots=size, num_draft_tokens=DRAFTS)

    def view(requests: list[int], seq_lens: list[int], loc: torch.Tensor, lens: list[int]) -> Any:
        layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device=torch.device("cpu"), grid=[rows])
        batch = forward_batch(ForwardMode.TARGET_VERIFY, requests, seq_lens, loc)
        return view_of(batch, spec_info=SimpleNamespace(ragged_verify_layout=layout, draft_token_num=DRAFTS))

    dummy = view([0] * size, [1] * size, torch.zeros(rows, dtype=torch.int64), lens)
    requests, seq_lens = [3, 1, 8], [1000, 126, 2049]
    loc = slots(runner, requests, seq_lens, verify_lens)
    replay = view([*requests, 0], [*seq_lens, 1], loc, verify_lens)
    recorded = view_of(replay, out_cache_loc=torch.nn.functional.pad(loc, (0, rows - len(loc))))
    for backend in backends:
        backend.init_cuda_graph_state(size, size * DRAFTS)
        backend.init_forward_metadata_out_graph(dummy, in_capture=True)
        backend.init_forward_metadata_in_graph(dummy)
        backend.on_after_cuda_graph_warmup()
        backend.init_forward_metadata_out_graph(replay)
        backend.init_forward_metadata_in_graph(recorded)
    ours, theirs = (backend.forward_metadata for backend in backends)
    assert ours.core_attn_metadata.positions_casual.shape == (rows,)
    # Rows that nobody needs are padding for us; SGLang gives them to the padding request, and plans that.
    known = ("c4_compress_metadata", "c128_compress_metadata", "raw_out_loc")
    total = sum(verify_lens)
    assert differences(ours, theirs, rows=total, skip=known) == []
    assert ours.core_attn_metadata.raw_out_loc.tolist() == loc.tolist() + [0] * (rows - total)
    assert ours.core_attn_metadata.seq_lens_casual[total:].tolist() == [1] * (rows - total)


def test_breakable_graph_refresh() -> None:
    runner, *backends = pair()
    capture = extend_batch(runner, [1], [0], [16])
    live = extend_batch(runner, [5], [290], [13], rows=16)
    captured = [backend.init_forward_metadata_for_breakable_cuda_graph_capture(capture) for backend in backends]
    assert differences(*captured) == []
    before = [addresses(metadata) for metadata in captured]
    plans = [captured[0].c4_compress_metadata, captured[0].c128_compress_metadata]
    plan_addresses = [part.data_ptr() for plan in plans for part in plan[1:3]]
    # An eager prompt in between must not reach what was captured.
    backends[0].init_forward_metadata(extend_batch(runner, [7], [0], [16]))
    for backend, metadata in zip(backends, captured, strict=True):
        backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(metadata, live, static_forward_batch=live)
        assert backend.forward_metadata is metadata
    assert differences(*captured, rows=13) == []
    # SGLang refreshes what its graphs read in place, and takes over the rest.
    ours, theirs = ({n for n in old if addresses(m)[n] == old[n]} for m, old in zip(captured, before, strict=True))
    assert ours == theirs
    assert "raw_out_loc" in ours
    assert plan_addresses == [part.data_ptr() for plan in plans for part in plan[1:3]]


def test_idle_rank() -> None:
    _runner, ours, _theirs = pair()
    ours.init_forward_metadata(forward_batch(ForwardMode.IDLE, [], [], torch.zeros(0, dtype=torch.int64)))
    assert ours.forward_metadata.core_attn_metadata.raw_out_loc.shape == (0,)
    ours.init_forward_metadata(forward_batch(ForwardMode.IDLE, [], [], torch.zeros(8, dtype=torch.int64)))
    core = ours.forward_metadata.core_attn_metadata
    assert core.seq_lens_casual.tolist() == [1] * 8
    assert core.swa_out_cache_loc.tolist() == [0] * 8


def test_idle_rank_that_drafts_keeps_its_metadata() -> None:
    _runner, ours, theirs = pair(drafts=DRAFTS)
    for backend in (ours, theirs):
        backend.forward_metadata = kept = object()
        backend.init_forward_metadata(forward_batch(ForwardMode.IDLE, [], [], torch.zeros(0, dtype=torch.int64)))
        assert backend.forward_metadata is kept
