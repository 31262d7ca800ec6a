"""The SGLang adapter on made-up batches of each mode, and what it refuses. SGLang is not needed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dsv4_backend as d4
from dsv4_backend.adapters.sglang.batches import extend_batch, plan_row_counts
from dsv4_backend.adapters.sglang.plugin import register
from dsv4_backend.adapters.sglang.releases import RELEASES, release_of
from dsv4_backend.adapters.sglang.source import MetadataSource
from sglang_fakes import EARLIER_TYPES, TYPES, Backend, EarlierCore, Mode, MultiStep, adopted, forward_batch

CONTEXT = 1024


def tables() -> d4.RequestTables:
    pages = torch.randperm(12, generator=torch.Generator().manual_seed(1)).view(3, 4) + 1
    req_to_token = torch.zeros(4, CONTEXT, dtype=torch.int32)
    req_to_token[1:] = (pages[:, :, None] * 256 + torch.arange(256)).flatten(1).int()
    full_to_swa = torch.arange(14 * 256 + 1)
    full_to_swa[-1] = -1
    return d4.RequestTables(req_to_token, full_to_swa)


TABLES = tables()


def slots(requests: list[int], first: list[int], counts: list[int]) -> torch.Tensor:
    parts = [TABLES.req_to_token[r, f : f + n] for r, f, n in zip(requests, first, counts, strict=True)]
    return torch.cat(parts).long()


def prompt(requests: list[int], prefix: list[int], extend: list[int], rows: int = 0) -> Any:
    loc = slots(requests, prefix, extend)
    return forward_batch(
        Mode.EXTEND,
        torch.tensor(requests),
        torch.tensor(prefix) + torch.tensor(extend),
        torch.nn.functional.pad(loc, (0, max(0, rows - len(loc)))),
        extend_seq_lens=torch.tensor(extend, dtype=torch.int32),
        extend_seq_lens_cpu=extend,
    )


def test_decode_hands_over_clamped_lengths_and_plans() -> None:
    backend = adopted(Backend(TABLES))
    seq = torch.tensor([3, 256, 1000])
    loc = slots([2, 1, 3], [2, 255, 999], [1, 1, 1])
    backend.init_forward_metadata(forward_batch(Mode.DECODE, torch.tensor([2, 1, 3]), seq, loc))
    metadata = backend.forward_metadata
    core = metadata.core_attn_metadata
    assert core.c4_topk_lengths_raw.tolist() == [0, 64, 250]
    assert core.c4_topk_lengths_clamp1.tolist() == core.c4_sparse_topk_lengths.tolist() == [1, 64, 250]
    assert core.c128_topk_lengths_clamp1.tolist() == [1, 2, 7]
    assert core.c128_page_indices[0, 0] == -1
    assert core.c4_sparse_raw_indices is None
    assert core.present_ratios == (4, 128)
    assert len({id(core.c0_flashmla_metadata), id(core.c4_flashmla_metadata), id(core.c128_flashmla_metadata)}) == 3
    plan = d4.plan_decode(seq, torch.tensor([2, 1, 3]), TABLES, d4.CacheGeometry())
    assert torch.equal(metadata.c4_compress_metadata.plan_d, plan.c4.rows)
    assert torch.equal(metadata.c128_compress_metadata[1], plan.c128.rows)


def test_an_earlier_release_names_things_differently() -> None:
    backend = Backend(TABLES)
    backend.c4_topk = backend.index_topk
    del backend.index_topk
    adopted(backend, EARLIER_TYPES)
    batch = forward_batch(Mode.DECODE, torch.tensor([2]), torch.tensor([256]), slots([2], [255], [1]))
    backend.init_forward_metadata(batch)
    core = backend.forward_metadata.core_attn_metadata
    assert type(core) is EarlierCore
    assert core.c4_sparse_topk == core.c4_sparse_page_indices.shape[1] == 512
    assert core.c1_flashmla_metadata is not None
    assert not hasattr(core, "c0_flashmla_metadata")
    assert not hasattr(core, "present_ratios")


def test_prompt_tables_are_as_wide_as_the_batch_and_plans_as_long_as_they_must_be() -> None:
    backend = adopted(Backend(TABLES))
    backend.init_forward_metadata(prompt([2, 1], [0, 250], [300, 20], rows=330))
    metadata = backend.forward_metadata
    core = metadata.core_attn_metadata
    assert core.page_table.shape == (330, 2)
    assert core.c128_page_indices.shape == (330, 64)
    assert core.c4_sparse_raw_indices.shape == core.c4_sparse_page_indices.shape
    assert core.raw_out_loc[320:].tolist() == [0] * 10
    plan = d4.plan_prefill(
        torch.tensor([300, 270]), torch.tensor([300, 20]), torch.tensor([2, 1]), TABLES, d4.CacheGeometry()
    )
    for lists, handed in ((plan.c4, metadata.c4_compress_metadata), (plan.c128, metadata.c128_compress_metadata)):
        assert handed.plan_c.shape[0] == len(lists.compress_records())
        assert handed.plan_w.shape[0] == len(lists.write_records())
        assert torch.equal(handed.plan_c, lists.compress[: handed.plan_c.shape[0]])
        assert torch.equal(handed.plan_w, lists.write[: handed.plan_w.shape[0]])


def test_captured_prompt_keeps_its_own_memory() -> None:
    backend = adopted(Backend(TABLES))
    captured = backend.init_forward_metadata_for_breakable_cuda_graph_capture(prompt([1], [0], [16]))
    core = captured.core_attn_metadata
    before = core.raw_out_loc.clone(), captured.c4_compress_metadata.plan_c.clone()
    assert core.page_table.shape == (16, CONTEXT // 256)
    assert core.swa_out_cache_loc is None
    assert captured.c4_compress_metadata.plan_c.shape[0] == captured.c4_compress_metadata.plan_w.shape[0] == 16
    backend.init_forward_metadata(prompt([2], [300], [16]))
    assert torch.equal(core.raw_out_loc, before[0])
    assert torch.equal(captured.c4_compress_metadata.plan_c, before[1])


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("drafts", [0, 4])
def test_rows_of_a_plan_counted_on_the_host(ratio: int, drafts: int) -> None:
    geom = d4.CacheGeometry.for_drafts(drafts)
    generator = np.random.default_rng(ratio + drafts)
    for _ in range(50):
        prefix = generator.integers(0, 600, 3)
        extend = generator.integers(0, 400, 3)
        seq = torch.from_numpy(prefix + extend)
        plan = d4.plan_prefill(seq, torch.from_numpy(extend), torch.tensor([1, 2, 3]), TABLES, geom)
        lists = plan.ratio(ratio)
        expected = len(lists.compress_records()), len(lists.write_records())
        assert plan_row_counts(seq.tolist(), extend.tolist(), ratio, geom) == expected


def test_eager_steps_of_any_size_share_their_tensors() -> None:
    backend = adopted(Backend(TABLES))
    for rows in range(9, 17):
        backend.init_forward_metadata(prompt([1], [0], [rows]))
    with backend.dsv4_source.building_eagerly():
        assert len(backend.dsv4_source.builder.buffers()) == 1


def test_a_new_mapping_is_followed() -> None:
    backend = adopted(Backend(TABLES))
    batch = forward_batch(Mode.DECODE, torch.tensor([1]), torch.tensor([5]), slots([1], [4], [1]))
    backend.init_forward_metadata(batch)
    first = backend.forward_metadata.core_attn_metadata.swa_out_cache_loc.clone()
    moved = TABLES.full_to_swa + 256
    backend.token_to_kv_pool.full_to_swa_index_mapping = moved
    backend.init_forward_metadata(batch)
    assert torch.equal(backend.forward_metadata.core_attn_metadata.swa_out_cache_loc, first + 256)


@pytest.mark.parametrize("padding", [1, 99, 100, 101, 250])
def test_padding_of_a_prompt_copies_nothing_from_the_host(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that becomes a tensor on a GPU waits for all that is under way there."""
    one, loc = torch.tensor([1]), torch.zeros(7 + padding, dtype=torch.int64)
    for name in ("tensor", "as_tensor", "from_numpy"):
        monkeypatch.delattr(torch, name)
    batch = extend_batch(one, one * 9, one * 7, loc, 7, 100)
    assert batch.extend_lens.tolist() == [7, *[100] * (padding // 100), *([padding % 100] if padding % 100 else [])]
    assert batch.seq_lens[1:].tolist() == batch.extend_lens[1:].tolist()
    assert batch.req_pool_indices.tolist() == [1] + [0] * (len(batch.extend_lens) - 1)


def test_draft_steps_of_an_idle_rank_are_padding() -> None:
    backend = adopted(MultiStep(TABLES, ratios=(), drafts=4, steps=3))
    none = torch.zeros(0, dtype=torch.int64)
    batch = forward_batch(Mode.IDLE, none, none, none, batch_size=2)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    for child in backend.attn_backends[:-1]:
        assert child.forward_metadata.core_attn_metadata.seq_lens_casual.tolist() == [1, 1]


REFUSED = {
    "DeepSeek-V4.1": {"is_dsv41": True},
    "DSpark": {"model_runner": SimpleNamespace(spec_algorithm=SimpleNamespace(is_dspark=lambda: True))},
    "online ratio-128 state": {"online_c128_mtp": SimpleNamespace(enabled=lambda: True)},
    "HiSparse": {"hisparse_coordinator": object()},
    "drafts with branches": {"topk": 2},
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_models_are_refused(what: str) -> None:
    backend = Backend(TABLES)
    vars(backend).update(REFUSED[what])
    with pytest.raises(ValueError, match=f"expected plain DeepSeek-V4 with chains of drafts, got {what}"):
        MetadataSource(backend, TYPES)


def test_more_drafts_than_the_rings_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="11"):
        MetadataSource(Backend(TABLES, drafts=11), TYPES)


def test_unknown_releases_are_named() -> None:
    assert list(RELEASES) == ["0.5.16", "0.5.23"]
    with pytest.raises(ValueError, match=r"expected one of the releases 0\.5\.16, 0\.5\.23, got 0\.5\.17"):
        release_of("0.5.17")


def test_switched_off_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_BACKEND", "off")
    register()


def test_a_switch_that_is_none_leaves_sglang_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSV4_BACKEND", "of")
    monkeypatch.delenv("DSV4_BACKEND_STRICT", raising=False)
    register()
    assert "SGLang's own path is used: ValueError: DSV4_BACKEND: expected one of" in caplog.text


def test_importing_us_imports_no_engine() -> None:
    modules = "dsv4_backend.adapters.sglang, dsv4_backend.adapters.vllm"
    code = f"import sys, {modules}; print({{'sglang', 'vllm'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
