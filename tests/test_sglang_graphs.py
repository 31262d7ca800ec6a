"""What a graph may rely on in the SGLang adapter: its memory, its tables, its inputs. SGLang is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_backend.adapters.sglang.batches import DraftInputs
from dsv4_backend.adapters.sglang.draft_steps import DraftMetadata
from sglang_fakes import Backend, Mode, MultiStep, adopted, forward_batch
from test_sglang_adapter import TABLES


def captured(backend: Any, mode: Mode, size: int) -> None:
    """What a graph runner does before it replays a step of `size` requests."""
    ints = torch.zeros(size, dtype=torch.int64)
    loc = torch.zeros(size * {Mode.TARGET_VERIFY: 4}.get(mode, 3 if hasattr(backend, "attn_backends") else 1)).long()
    dummy = forward_batch(mode, ints, ints + 1, loc)
    backend.init_forward_metadata_out_graph(dummy, in_capture=True)
    backend.init_forward_metadata_in_graph(dummy)


def replayed(backend: Any, size: int) -> None:
    req = torch.arange(size) % 3 + 1
    steps = 3 if hasattr(backend, "attn_backends") else 1
    batch = forward_batch(Mode.DECODE, req, torch.full((size,), 9), torch.arange(size * steps) + 300)
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.TARGET_VERIFY])
def test_graphs_of_all_sizes_need_little_more_memory_than_the_largest(mode: Mode) -> None:
    one, all_sizes = (adopted(Backend(TABLES, drafts=4)) for _ in range(2))
    captured(one, mode, 16)
    for size in range(16, 0, -1):
        captured(all_sizes, mode, size)
    assert all_sizes.dsv4_source.builder.nbytes < 2.5 * one.dsv4_source.builder.nbytes


def test_a_step_without_a_graph_does_not_touch_what_graphs_read() -> None:
    backend = adopted(Backend(TABLES))
    captured(backend, Mode.DECODE, 2)
    replayed(backend, 2)
    core = backend.forward_metadata.core_attn_metadata
    before = core.raw_out_loc.clone(), core.c4_topk_lengths_clamp1.clone()
    batch = forward_batch(Mode.DECODE, torch.tensor([1, 2]), torch.tensor([800, 900]), torch.tensor([400, 500]))
    backend.init_forward_metadata(batch)
    assert torch.equal(core.raw_out_loc, before[0])
    assert torch.equal(core.c4_topk_lengths_clamp1, before[1])


@pytest.mark.parametrize("kind", [Backend, MultiStep])
def test_graphs_do_not_outlive_their_tables(kind: type) -> None:
    backend = adopted(kind(TABLES, ratios=(), drafts=4, steps=3))
    captured(backend, Mode.DECODE, 2)
    replayed(backend, 2)
    backend.token_to_kv_pool.full_to_swa_index_mapping = TABLES.full_to_swa.clone()
    with pytest.raises(ValueError, match="expected those that the graphs were captured with"):
        replayed(backend, 2)
    captured(backend, Mode.DECODE, 2)
    replayed(backend, 2)


def test_draft_graphs_do_not_outlive_their_tables() -> None:
    backend = adopted(MultiStep(TABLES, ratios=(), drafts=4, steps=3))
    metadata = DraftMetadata(backend, lambda _inputs: None)
    ones = torch.ones(2, dtype=torch.int64)
    inputs = SimpleNamespace(
        req_pool_indices=ones, seq_lens=ones, out_cache_loc=ones.repeat(3), batch_size=2, num_steps=3, topk=1
    )
    metadata.bind_draft(inputs)
    metadata.prepare_draft(inputs, 2)
    backend.token_to_kv_pool.full_to_swa_index_mapping = TABLES.full_to_swa.clone()
    with pytest.raises(ValueError, match="expected those that the graphs were captured with"):
        metadata.prepare_draft(inputs, 2)


@pytest.mark.parametrize("kind", [Backend, MultiStep])
def test_captured_in_inference_mode_replayed_outside(kind: type) -> None:
    backend = adopted(kind(TABLES, ratios=(4, 128) if kind is Backend else (), drafts=4, steps=3))
    with torch.inference_mode():
        captured(backend, Mode.DECODE, 2)
        built = next(child.forward_metadata for child in getattr(backend, "attn_backends", [backend]))
    core = built.core_attn_metadata
    if kind is MultiStep:
        replayed(backend, 2)
        assert core.raw_out_loc.tolist() == [300, 303]
    else:
        assert not any(value.is_inference() for value in vars(core).values() if isinstance(value, torch.Tensor))


def test_a_draft_batch_that_does_not_fit_writes_nothing() -> None:
    inputs = DraftInputs.empty(2, 3, torch.device("cpu"))
    ones = torch.ones(2, dtype=torch.int64)
    batch = forward_batch(Mode.DECODE, ones, ones * 5, torch.ones(9, dtype=torch.int64))
    with pytest.raises(ValueError, match="out_cache_loc: expected at most 6 in a bucket of 2, got 9"):
        inputs.load(batch)
    assert inputs.req_pool_indices.tolist() == [0, 0]
    assert inputs.seq_lens.tolist() == [1, 1]
