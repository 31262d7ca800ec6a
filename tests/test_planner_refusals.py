"""Arguments that plan_prefill and plan_decode refuse before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dsv4_backend as d4
from backends import (
    INTERPRET,
    poisoned_decode,
    poisoned_prefill,
)
from dsv4_backend.plans import MAX_ROWS
from planner_checks import (
    GEOM,
    contents,
)
from strategies import make_pool

TABLES = make_pool(GEOM, 5, 40, 0).tables("cpu")
META = torch.device("meta")


def legal() -> dict[str, object]:
    return {
        "seq_lens": torch.tensor([5, 9]),
        "extend_lens": torch.tensor([5, 3]),
        "req_pool_indices": torch.tensor([1, 4]),
        "tables": TABLES,
        "geom": GEOM,
        "num_rows": 8,
        "ratios": (4, 128),
        "impl": "torch",
        "out": poisoned_prefill(8, (4, 128), "cpu"),
    }


# arguments that replace the legal ones, and how the message begins
REFUSED_PREFILL = [
    ({"seq_lens": [5, 9]}, "seq_lens: expected a torch.Tensor, got list"),
    ({"seq_lens": np.array([5, 9])}, "seq_lens: expected a torch.Tensor, got ndarray"),
    ({"seq_lens": torch.tensor([5.0, 9.0])}, "seq_lens: expected dtype int32 or int64, got float32"),
    ({"seq_lens": torch.tensor([5, 9], dtype=torch.int16)}, "seq_lens: expected dtype int32 or int64, got int16"),
    ({"seq_lens": torch.tensor([[5, 9]])}, "seq_lens: expected 1 dimension, got shape [1, 2]"),
    ({"seq_lens": torch.tensor(5)}, "seq_lens: expected 1 dimension, got shape []"),
    ({"seq_lens": torch.tensor([5, 9, 1])}, "seq_lens: expected 2 elements, got 3"),
    ({"seq_lens": torch.tensor([5])}, "seq_lens: expected 2 elements, got 1"),
    ({"seq_lens": torch.tensor([5, -9])}, "seq_lens[1]: expected 0 to 40 (columns of req_to_token), got -9"),
    ({"seq_lens": torch.tensor([41, 9])}, "seq_lens[0]: expected 0 to 40 (columns of req_to_token), got 41"),
    (
        {"seq_lens": torch.tensor([5, 9], device=META), "extend_lens": torch.tensor([5, 3], device=META)},
        "seq_lens: expected a tensor on cpu, got one on meta",
    ),
    (
        {"seq_lens": torch.tensor([5, 9], device=META)},
        "seq_lens and extend_lens: expected both on one device, got meta",
    ),
    ({"extend_lens": None}, "extend_lens: expected a torch.Tensor, got NoneType"),
    ({"extend_lens": torch.tensor([True, True])}, "extend_lens: expected dtype int32 or int64, got bool"),
    ({"extend_lens": torch.tensor([[5], [3]])}, "extend_lens: expected 1 dimension, got shape [2, 1]"),
    ({"extend_lens": torch.tensor([])}, "extend_lens: expected dtype int32 or int64, got float32"),
    ({"extend_lens": torch.tensor([5])}, "extend_lens: expected 2 elements, got 1"),
    ({"extend_lens": torch.tensor([-1, 3])}, "extend_lens[0]: expected 0 to 40 (columns of req_to_token), got -1"),
    ({"extend_lens": torch.tensor([5, 10])}, "extend_lens[1]: expected at most seq_lens[1] = 9, got 10"),
    ({"req_pool_indices": (1, 4)}, "req_pool_indices: expected a torch.Tensor, got tuple"),
    ({"req_pool_indices": torch.tensor([1.0, 4.0])}, "req_pool_indices: expected dtype int32 or int64, got float32"),
    ({"req_pool_indices": torch.tensor([[1, 4]])}, "req_pool_indices: expected 1 dimension, got shape [1, 2]"),
    ({"req_pool_indices": torch.tensor([1, 5])}, "req_pool_indices[1]: expected 0 to 4 (rows of req_to_token), got 5"),
    (
        {"req_pool_indices": torch.tensor([-1, 4])},
        "req_pool_indices[0]: expected 0 to 4 (rows of req_to_token), got -1",
    ),
    (
        {"req_pool_indices": torch.tensor([1, 4], device=META)},
        "req_pool_indices: expected a tensor on cpu, got one on meta",
    ),
    ({"num_rows": 7}, "num_rows: expected at least the sum of extend_lens, 8, got 7"),
    ({"num_rows": -1}, f"num_rows: expected a number from 0 to {MAX_ROWS}, got -1"),
    ({"num_rows": MAX_ROWS + 1}, f"num_rows: expected a number from 0 to {MAX_ROWS}, got {MAX_ROWS + 1}"),
    ({"num_rows": 8.0}, "num_rows: expected an int, got 8.0"),
    ({"num_rows": True}, "num_rows: expected an int, got True"),
    ({"num_rows": "8"}, "num_rows: expected an int, got '8'"),
    ({"num_rows": torch.tensor(8)}, "num_rows: expected an int, got tensor(8)"),
    ({"ratios": (4, 4)}, "ratios: expected a selection of (4, 128), each at most once, got (4, 4)"),
    ({"ratios": (4, 64)}, "ratios: expected a selection of (4, 128), each at most once, got (4, 64)"),
    ({"ratios": 4}, "ratios: expected "),
    ({"impl": "numpy"}, "impl: expected one of "),
    ({"impl": None}, "impl: expected one of "),
    ({"tables": (TABLES.req_to_token, TABLES.full_to_swa)}, "tables: expected a RequestTables, got tuple"),
    ({"geom": 256}, "geom: expected a CacheGeometry, got int"),
    ({"out": object()}, "out: expected a PrefillPlan, got object"),
    ({"out": poisoned_decode(8, (4, 128), "cpu")}, "out: expected a PrefillPlan, got DecodePlans"),
    ({"out": poisoned_prefill(8, (4,), "cpu")}, "out: expected a plan of the ratios (4, 128), got one of (4,)"),
    ({"ratios": (4,)}, "out: expected a plan of the ratios (4,), got one of (4, 128)"),
    ({"ratios": ()}, "out: expected a plan of the ratios (), got one of (4, 128)"),
    ({"out": poisoned_prefill(9, (4, 128), "cpu")}, "out: expected a plan of 8 rows, got one of 9"),
    ({"num_rows": None, "out": poisoned_prefill(9, (4, 128), "cpu")}, "out: expected a plan of 8 rows, got one of 9"),
    ({"num_rows": 65_537}, "out: expected a plan of 65537 rows, got one of 8"),
    ({"out": d4.PrefillPlan.empty(8, device=META)}, "out: expected a plan on cpu, got one on meta"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [pytest.param(*case, id=f"{i}-{'-'.join(case[0])}") for i, case in enumerate(REFUSED_PREFILL)],
)
def test_prefill_refusals_come_before_anything_is_written(changes: dict[str, object], message: str) -> None:
    arguments = {**legal(), **changes}
    buffers = list_buffers(arguments["out"])
    before = [buffer.clone() for buffer in buffers]
    with pytest.raises(ValueError, match=r"expected .*, got ") as raised:
        d4.plan_prefill(**arguments)
    assert str(raised.value).startswith(message)
    assert all(torch.equal(now, then) for now, then in zip(buffers, before, strict=True))


def list_buffers(out: object) -> list[torch.Tensor]:
    if not isinstance(out, d4.PrefillPlan | d4.DecodePlans):
        return []
    buffers = [tensor for _, tensor in out.tensors()]
    return [tensor for tensor in buffers if not tensor.is_meta]


REFUSED_DECODE = [
    ({"seq_lens": [5, 9]}, "seq_lens: expected a torch.Tensor, got list"),
    ({"seq_lens": torch.tensor([5.0, 9.0])}, "seq_lens: expected dtype int32 or int64, got float32"),
    ({"seq_lens": torch.tensor([[5], [9]])}, "seq_lens: expected 1 dimension, got shape [2, 1]"),
    ({"seq_lens": torch.tensor([5])}, "seq_lens: expected 2 elements, got 1"),
    ({"seq_lens": torch.tensor([5, 9], device=META)}, "seq_lens: expected a tensor on cpu, got one on meta"),
    ({"seq_lens": torch.tensor([0, 9])}, "seq_lens[0]: expected 1 to 40 (columns of req_to_token), got 0"),
    ({"seq_lens": torch.tensor([5, -1])}, "seq_lens[1]: expected 1 to 40 (columns of req_to_token), got -1"),
    ({"seq_lens": torch.tensor([5, 41])}, "seq_lens[1]: expected 1 to 40 (columns of req_to_token), got 41"),
    ({"req_pool_indices": None}, "req_pool_indices: expected a torch.Tensor, got NoneType"),
    ({"req_pool_indices": torch.tensor([1.0, 4.0])}, "req_pool_indices: expected dtype int32 or int64, got float32"),
    ({"req_pool_indices": torch.tensor([5, 4])}, "req_pool_indices[0]: expected 0 to 4 (rows of req_to_token), got 5"),
    (
        {"req_pool_indices": torch.tensor([1, -4])},
        "req_pool_indices[1]: expected 0 to 4 (rows of req_to_token), got -4",
    ),
    ({"req_pool_indices": torch.tensor([1, 4], device=META)}, "req_pool_indices: expected a tensor on cpu, got one on"),
    ({"ratios": (128, 128)}, "ratios: expected a selection of (4, 128), each at most once, got (128, 128)"),
    ({"ratios": None}, "ratios: expected "),
    ({"impl": "cuda"}, "impl: expected one of "),
    ({"tables": None}, "tables: expected a RequestTables, got NoneType"),
    ({"geom": None}, "geom: expected a CacheGeometry, got NoneType"),
    ({"out": poisoned_prefill(2, (4, 128), "cpu")}, "out: expected a DecodePlans, got PrefillPlan"),
    ({"ratios": (128,)}, "out: expected a plan of the ratios (128,), got one of (4, 128)"),
    ({"out": poisoned_decode(3, (4, 128), "cpu")}, "out: expected a plan of 2 rows, got one of 3"),
    ({"out": d4.DecodePlans.empty(2, device=META)}, "out: expected a plan on cpu, got one on meta"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [pytest.param(*case, id=f"{i}-{'-'.join(case[0])}") for i, case in enumerate(REFUSED_DECODE)],
)
def test_decode_refusals_come_before_anything_is_written(changes: dict[str, object], message: str) -> None:
    arguments = {**legal(), "out": poisoned_decode(2, (4, 128), "cpu"), **changes}
    del arguments["extend_lens"], arguments["num_rows"]
    buffers = list_buffers(arguments["out"])
    before = [buffer.clone() for buffer in buffers]
    with pytest.raises(ValueError, match=r"expected .*, got ") as raised:
        d4.plan_decode(**arguments)
    assert str(raised.value).startswith(message)
    assert all(torch.equal(now, then) for now, then in zip(buffers, before, strict=True))


def test_the_legal_arguments_are_legal() -> None:
    d4.plan_prefill(**legal()).check()
    arguments = {**legal(), "out": poisoned_decode(2, (4, 128), "cpu")}
    del arguments["extend_lens"], arguments["num_rows"]
    d4.plan_decode(**arguments).check()


@pytest.mark.skipif(INTERPRET, reason="the interpreter runs Triton on a CPU")
def test_an_explicit_choice_never_falls_back() -> None:
    with pytest.raises(ValueError, match=r"^impl: expected a GPU, or TRITON_INTERPRET=1, for 'triton', got .* cpu$"):
        d4.plan_prefill(**{**legal(), "impl": "triton"})
    assert d4.dispatch.resolve_impl("auto", torch.device("cpu")) == "torch"


@pytest.mark.gpu
def test_lengths_on_the_gpu_need_num_rows() -> None:
    tables = make_pool(GEOM, 5, 40, 0).tables("cuda")
    lens = torch.tensor([5, 9])
    with pytest.raises(ValueError, match=r"^num_rows: expected an int, since the lengths are on the device; got None"):
        d4.plan_prefill(lens.cuda(), lens.cuda(), lens.cuda() % 5, tables, GEOM)
    with pytest.raises(ValueError, match=r"^seq_lens and extend_lens: expected both on one device"):
        d4.plan_prefill(lens, lens.cuda(), lens.cuda() % 5, tables, GEOM, 14)
    with pytest.raises(ValueError, match=r"^req_pool_indices: expected a tensor on cuda:0, got one on cpu"):
        d4.plan_prefill(lens, lens, lens % 5, tables, GEOM)
    with pytest.raises(ValueError, match=r"^seq_lens: expected a tensor on cuda:0, got one on cpu"):
        d4.plan_decode(lens, lens.cuda() % 5, tables, GEOM)
    with pytest.raises(ValueError, match=r"^out: expected a plan on cuda:0, got one on cpu"):
        d4.plan_prefill(lens, lens, lens.cuda() % 5, tables, GEOM, out=poisoned_prefill(14, (4, 128), "cpu"))


@pytest.mark.gpu
def test_host_lengths_are_refused_while_a_graph_is_captured() -> None:
    tables = make_pool(GEOM, 5, 40, 0).tables("cuda")
    lens, reqs = torch.tensor([5, 9]), torch.tensor([1, 2], device="cuda")
    out = poisoned_prefill(14, (4, 128), "cuda")
    before = contents(out)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ValueError, match="while a CUDA graph is captured"):
        d4.plan_prefill(lens, lens, reqs, tables, GEOM, 14, out=out)
    assert contents(out) == before
