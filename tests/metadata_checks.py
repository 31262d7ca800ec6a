"""What the metadata tests compare builds with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

import dsv4_backend as d4
from backends import INTERPRET
from dsv4_backend.metadata_buffers import BucketKey
from metadata_oracle import MetadataAnswer, MetadataOracle
from metadata_steps import GuardedBuilder, Setting, Step
from planner_oracle import compress_bytes, decode_bytes, write_bytes
from strategies import make_pool

FIELD_NAMES = (
    *("seq_lens_causal", "positions", "req_pool_indices_per_row", "raw_out_cache_loc", "swa_out_cache_loc"),
    *("page_table", "swa_lengths", "swa_page_indices"),
    *("c4_lengths", "c4_sparse_lengths", "c4_sparse_page_indices", "c4_out_loc"),
    *("c128_lengths", "c128_page_indices", "c128_out_loc"),
)
OF_64_BITS = ("req_pool_indices_per_row", "raw_out_cache_loc", "c4_out_loc", "c128_out_loc")
TABLES = ("page_table", "c128_page_indices")


def few(values: Mapping[str, object], count: int = 2) -> pytest.MarkDecorator:
    """Parametrises over `values` by name; over the first few where Triton's interpreter would take minutes."""
    names = list(values)[: count if INTERPRET else None]
    return pytest.mark.parametrize("value", [values[name] for name in names], ids=names)


def setting_of(columns: int, num_requests: int = 9, seed: int = 0, **options: object) -> Setting:
    """A setting for a case made by hand."""
    geom = options.get("geom", Setting.geom)
    return Setting(make_pool(geom, num_requests, columns, seed), **options)


def check_build(builder: GuardedBuilder, metas: list[d4.AttnMetadata], setting: Setting, step: Step) -> None:
    """Every value that may be read, the error flag, and the red zones, against the oracle."""
    oracle = MetadataOracle(setting)
    for meta, answer in zip(metas, oracle.answers(step), strict=True):
        check_answer(meta, answer, setting)
    error = int(builder._error)
    assert bool(error) == bool(oracle.errors), f"error flag {error}, causes {oracle.errors}"
    assert error & ~oracle.errors == 0
    builder.check_guards()


def check_answer(meta: d4.AttnMetadata, answer: MetadataAnswer, setting: Setting) -> None:
    num_rows = len(answer.owners)
    assert meta.num_rows == num_rows
    for name in FIELD_NAMES:
        value = getattr(meta, name)
        assert (value is None) == (name not in answer.fields), name
        if value is None:
            continue
        assert value.dtype == (torch.int64 if name in OF_64_BITS else torch.int32), name
        if name in TABLES:
            _check_table(name, meta, answer, setting)
        else:
            expected = np.array(answer.fields[name]).reshape(num_rows, *value.shape[1:])
            np.testing.assert_array_equal(value.cpu().numpy(), expected, name)
    _check_plans(meta, answer, setting)


def _check_table(name: str, meta: d4.AttnMetadata, answer: MetadataAnswer, setting: Setting) -> None:
    value, places = getattr(meta, name).cpu(), range(meta.num_rows)
    assert value.shape[1] == columns(name, setting)
    if meta.table_rows is not None:
        padding = value.shape[0] - 1
        places = [padding if owner is None else owner for owner in answer.owners]
        assert meta.table_rows.dtype == torch.int32
        assert meta.table_rows.tolist() == places
    for row, (place, expected) in enumerate(zip(places, answer.fields[name], strict=True)):
        assert value[place, : len(expected)].tolist() == expected, f"{name}[{row}]"
        if not expected and meta.table_rows is None:
            assert value[place, 0] == -1, f"{name}[{row}, 0]"


def columns(name: str, setting: Setting) -> int:
    longest = setting.max_seq_len or setting.pool.req_to_token.shape[1]
    pages = -(-longest // setting.geom.page_size)
    return pages if name == "page_table" else -(-pages * (setting.geom.page_size // 128) // 64) * 64


def _check_plans(meta: d4.AttnMetadata, answer: MetadataAnswer, setting: Setting) -> None:
    if not answer.prefill and not answer.decode:
        assert meta.plans is None
        return
    assert isinstance(meta.plans, d4.PrefillPlan if answer.prefill else d4.DecodePlans)
    assert meta.plans.ratios == tuple(sorted(setting.ratios))
    for ratio, decode in answer.decode.items():
        _check_bytes(meta.plans.ratio(ratio).rows, decode_bytes(decode), f"c{ratio}")
    counts = []
    for ratio in (4, 128):
        prefill = answer.prefill.get(ratio)
        counts += [len(prefill.compress), len(prefill.write)] if prefill else [0, 0]
        if prefill:
            _check_bytes(meta.plans.ratio(ratio).compress, compress_bytes(prefill, meta.num_rows), f"c{ratio}.compress")
            _check_bytes(meta.plans.ratio(ratio).write, write_bytes(prefill, meta.num_rows), f"c{ratio}.write")
            assert meta.plans.header.tolist()[:4] == prefill.header
    if answer.prefill:
        assert meta.plans.header.tolist()[4:] == counts


def _check_bytes(rows: torch.Tensor, expected: np.ndarray, name: str) -> None:
    np.testing.assert_array_equal(rows.cpu().numpy(), expected, name)


def contents(builder: d4.MetadataBuilder) -> dict[BucketKey, dict[str, torch.Tensor]]:
    """A copy of all buffers: what was written, and what was not. The header of a step without plans is scratch."""
    return {
        key: {
            name: tensor.cpu().clone() for name, tensor in tensors.items() if name != "header" or key.has_prefill_plan
        }
        for key, tensors in builder.buffers().items()
    }


def assert_same_bits(
    ours: Mapping[BucketKey, Mapping[str, torch.Tensor]], theirs: Mapping[BucketKey, Mapping[str, torch.Tensor]]
) -> None:
    assert ours.keys() == theirs.keys()
    for key, tensors in ours.items():
        assert tensors.keys() == theirs[key].keys()
        for name, tensor in tensors.items():
            other = theirs[key][name]
            assert tensor.dtype == other.dtype, name
            assert torch.equal(tensor, other), f"{name} differs first at {(tensor != other).nonzero()[0].tolist()}"
