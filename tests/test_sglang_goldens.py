"""Every golden of the metadata through the SGLang adapter: what its objects hold is what SGLang's backend computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsv4_backend import MetadataBuilder
from dsv4_backend.adapters.sglang.objects import Clamped, core_metadata
from dsv4_backend.metadata_goldens import MetadataGolden, load_metadata_goldens
from goldens_location import goldens_dir
from sglang_fakes import TYPES, Backend, Metadata, Mode, MultiStep, adopted, forward_batch

DIRECTORY = goldens_dir("metadata")
GOLDENS = load_metadata_goldens(DIRECTORY) if DIRECTORY.is_dir() else []

FIELDS = {
    "page_table": "page_table",
    "raw_out_loc": "raw_out_loc",
    "seq_lens_causal": "seq_lens_casual",
    "positions": "positions_casual",
    "swa_page_indices": "swa_page_indices",
    "swa_topk_lengths": "swa_topk_lengths",
    "swa_out_cache_loc": "swa_out_cache_loc",
    "c4_out_loc": "c4_out_loc",
    "c4_topk_lengths_raw": "c4_topk_lengths_raw",
    "c4_topk_lengths_clamp1": "c4_topk_lengths_clamp1",
    "c4_sparse_topk_lengths": "c4_sparse_topk_lengths",
    "c4_sparse_page_indices": "c4_sparse_page_indices",
    "c128_out_loc": "c128_out_loc",
    "c128_page_indices": "c128_page_indices",
    "c128_topk_lengths_clamp1": "c128_topk_lengths_clamp1",
}
"""Arrays of a golden, and fields of SGLang's object."""

INT64 = {"raw_out_loc", "c4_out_loc", "c128_out_loc"}


def backend_of(golden: MetadataGolden, kind: type = Backend) -> Any:
    geom, constants = golden.geometry, golden.constants
    return adopted(
        kind(
            golden.tables("cpu"),
            ratios=golden.ratios,
            rings={4: geom.c4_ring, 128: geom.c128_ring},
            drafts=constants["num_draft_tokens"],
            steps=constants.get("num_steps", 0),
            index_topk=constants["index_topk"],
        )
    )


def tensor(golden: MetadataGolden, name: str, prefix: str = "in_") -> torch.Tensor:
    return torch.from_numpy(golden.arrays[prefix + name])


def batch_of(golden: MetadataGolden, mode: Mode, prefix: str = "in_") -> Any:
    """What SGLang passes; for a replay the padded requests, with the live slots as it has them there."""
    req, seq = tensor(golden, "req_pool_indices", prefix), tensor(golden, "seq_lens", prefix)
    extra: dict[str, Any] = {}
    if mode is Mode.EXTEND:
        extra["extend_seq_lens"] = tensor(golden, "extend_seq_lens")
        extra["extend_seq_lens_cpu"] = extra["extend_seq_lens"].tolist()
    if "_RAGGED" in golden.kind:
        extra["spec_info"] = SimpleNamespace(verify_lens=tensor(golden, "verify_lens"), graph_num_tokens=golden.rows)
    extra["actual_forward_mode"] = Mode.IDLE if golden.kind.endswith("_IDLE") else mode
    size = golden.constants["graph_bs"] if prefix == "in_padded_" else len(req)
    return forward_batch(mode, req, seq, tensor(golden, "out_cache_loc"), batch_size=size, **extra)


def draft_steps(golden: MetadataGolden) -> list[Metadata]:
    backend = backend_of(golden, MultiStep)
    if not golden.in_graph:
        backend.init_forward_metadata(batch_of(golden, Mode.DECODE))
    else:
        padded = batch_of(golden, Mode.DECODE, "in_padded_")
        dummy = forward_batch(
            Mode.DECODE,
            torch.zeros_like(padded.req_pool_indices),
            torch.ones_like(padded.seq_lens),
            torch.zeros_like(tensor(golden, "out_cache_loc", "in_padded_")),
        )
        backend.init_forward_metadata_out_graph(dummy, in_capture=True)
        backend.init_forward_metadata_in_graph(dummy)
        backend.init_forward_metadata_out_graph(padded)
        backend.init_forward_metadata_in_graph(padded)
    assert backend.attn_backends[-1].forward_metadata is None
    return [child.forward_metadata for child in backend.attn_backends[:-1]]


def draft_steps_with_ratios(golden: MetadataGolden) -> list[Metadata]:
    """Such a draft model is refused as a whole; its objects are made all the same."""
    with pytest.raises(ValueError, match="expected layers of ratio 0 only"):
        backend_of(golden, MultiStep)
    builder = MetadataBuilder(
        golden.config,
        golden.geometry,
        golden.tables("cpu"),
        max_rows=golden.rows,
        max_seq_len=golden.constants["max_context_len"],
        ratios=golden.ratios,
    )
    made = []
    for _name, batch in golden.batches("cpu"):
        steps = builder.build_draft_steps(batch, golden.rows, "frozen")
        made = [Metadata(core_metadata(TYPES, meta, Clamped().lengths(meta, fixed=False)), None) for meta in steps]
    return made


def steps_of(golden: MetadataGolden) -> list[Metadata]:
    """The adapter's objects for a golden: one, or one a draft step."""
    if golden.kind.startswith("EAGLE"):
        return draft_steps_with_ratios(golden) if golden.ratios else draft_steps(golden)
    mode = Mode[golden.kind.removesuffix("_IDLE").removesuffix("_GRAPH").removesuffix("_RAGGED")]
    backend = backend_of(golden)
    if not golden.in_graph:
        backend.init_forward_metadata(batch_of(golden, mode))
        return [backend.forward_metadata]
    padded = batch_of(golden, mode, "in_padded_")
    dummy = SimpleNamespace(**vars(padded))
    dummy.req_pool_indices = torch.zeros_like(padded.req_pool_indices)
    dummy.seq_lens = torch.ones_like(padded.seq_lens)
    dummy.out_cache_loc = torch.zeros_like(padded.out_cache_loc)
    backend.init_forward_metadata_out_graph(dummy, in_capture=True)
    backend.init_forward_metadata_in_graph(dummy)
    backend.on_after_cuda_graph_warmup()
    backend.init_forward_metadata_in_graph(dummy)
    captured = backend.forward_metadata.core_attn_metadata
    backend.init_forward_metadata_out_graph(padded)
    backend.init_forward_metadata_in_graph(padded)
    again = backend.forward_metadata.core_attn_metadata
    for name in FIELDS.values():
        if getattr(captured, name) is not None:
            assert getattr(captured, name).data_ptr() == getattr(again, name).data_ptr(), name
    return [backend.forward_metadata]


@pytest.mark.skipif(not GOLDENS, reason="the goldens of the metadata are not here")
@pytest.mark.parametrize("golden", GOLDENS, ids=[golden.name for golden in GOLDENS])
def test_golden(golden: MetadataGolden) -> None:
    metadata = steps_of(golden)
    assert len(metadata) == golden.num_steps
    for step, made in enumerate(metadata):
        core = made.core_attn_metadata
        rows = golden.rows if golden.kind == "DECODE_GRAPH_IDLE" else golden.real_rows
        lengths = golden.answer("seq_lens_causal", step)[:rows]
        for name, attribute in FIELDS.items():
            value = getattr(core, attribute)
            wanted = not name.startswith(("c4_", "c128_")) or int(name[1 : name.index("_")]) in golden.ratios
            assert (value is not None) == wanted, name
            if value is None:
                continue
            assert value.dtype == (torch.int64 if name in INT64 else torch.int32), name
            assert len(value) == golden.rows, name
            compare(name, value[:rows].numpy(), golden.answer(name, step)[:rows], lengths)
        if made.indexer_metadata is not None:
            assert made.indexer_metadata.page_table is core.page_table
            assert made.indexer_metadata.compressed_seq_lens is core.c4_topk_lengths_raw
        assert core.seq_lens_casual[rows:].eq(1).all()
        assert not core.raw_out_loc[rows:].any()


def compare(name: str, ours: np.ndarray, theirs: np.ndarray, lengths: np.ndarray) -> None:
    if name in ("page_table", "c128_page_indices"):
        width = min(ours.shape[1], theirs.shape[1])
        live = -(-lengths // 256) if name == "page_table" else np.maximum(lengths // 128, 1)
        unread = np.arange(width) >= live[:, None]
        ours, theirs = (np.where(unread, 0, value[:, :width]) for value in (ours, theirs))
    np.testing.assert_array_equal(ours, theirs, err_msg=name)
