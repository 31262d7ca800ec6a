"""Compares what we compute with goldens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dsv4_backend.goldens import PlanGolden
from dsv4_backend.planner import plan_decode, plan_prefill
from dsv4_backend.plans import (
    HEADER_FIELDS,
    INVALID_PACKED_WORDS,
    INVALID_WIDE_WORDS,
    INVALID_WRITE_WORDS,
    PACKED_COMPRESS,
    CompressPlan,
    PrefillPlan,
)


def verify_plan(golden: PlanGolden, impl: str, device: torch.device) -> str | None:
    """The first difference between our plan and the golden's, as one line; None when there is none.

    Beyond the golden's rows it checks what we promise on top: ascending rows, then invalid markers only, no error flag.
    """
    try:
        return (
            _verify_decode(golden, impl, device) if golden.kind == "decode" else _verify_prefill(golden, impl, device)
        )
    except ValueError as error:
        return f"refused: {error}"


def _verify_prefill(golden: PlanGolden, impl: str, device: torch.device) -> str | None:
    # The golden says whether its planner had the lengths on the host; on a CPU that is the same thing.
    lengths_device = "cpu" if str(golden.arrays["planner_path"]) == "cpu" else device
    plan = plan_prefill(
        golden.tensor("seq_lens", lengths_device),
        golden.tensor("extend_lens", lengths_device),
        golden.tensor("req_pool_indices", device),
        golden.tables(device),
        golden.geometry,
        num_rows=int(golden.arrays["num_q_tokens"]),
        ratios=(golden.ratio,),
        impl=impl,
    )
    plan.check()
    lists = plan.ratio(golden.ratio)
    assert lists is not None
    meaningful = golden.arrays["exp_plan_c_pages_meaningful"].astype(bool)

    def same_compress(field: str, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        equal = ours == theirs
        return equal | ~meaningful if field.startswith("read_page") else equal

    return (
        _first_difference("compress", lists.compress_records(), golden.arrays["exp_plan_c"], same_compress)
        or _first_difference("write", lists.write_records(), golden.arrays["exp_plan_w"])
        or check_order(lists)
        or _check_header(plan, lists)
    )


def _verify_decode(golden: PlanGolden, impl: str, device: torch.device) -> str | None:
    plan = plan_decode(
        golden.tensor("seq_lens", device),
        golden.tensor("req_pool_indices", device),
        golden.tables(device),
        golden.geometry,
        ratios=(golden.ratio,),
        impl=impl,
    )
    plan.check()
    rows = plan.ratio(golden.ratio)
    assert rows is not None
    return _first_difference("decode", rows.records(), golden.arrays["exp_plan_d"])


def check_order(plan: CompressPlan) -> str | None:
    """The first row of `plan` that breaks "ascending rows, then invalid markers only"; None when there is none."""
    packed = plan.compress.shape[1] == PACKED_COMPRESS.itemsize
    for name, rows, valid, marker in (
        ("compress", plan.compress, plan.compress_records(), INVALID_PACKED_WORDS if packed else INVALID_WIDE_WORDS),
        ("write", plan.write, plan.write_records(), INVALID_WRITE_WORDS),
    ):
        ascends = np.diff(valid["ragged_id"].astype(np.int64)) > 0
        if not ascends.all():
            return f"{name} row {int(np.argmin(ascends)) + 1}: row ids do not ascend"
        tail = rows.cpu().numpy().view("<i4")[len(valid) :]
        unused = (tail == np.array(marker)).all(axis=1)
        if not unused.all():
            at = int(np.argmin(unused))
            return f"{name} row {len(valid) + at}: expected the invalid marker, got the words {tail[at].tolist()}"
    return None


def _check_header(plan: PrefillPlan, lists: CompressPlan) -> str | None:
    at = HEADER_FIELDS.index(f"c{lists.ratio}_compress_rows")
    counted = [len(lists.compress_records()), len(lists.write_records())]
    reported = plan.header[at : at + 2].tolist()
    return None if reported == counted else f"header: expected row counts {counted}, got {reported}"


def _first_difference(
    what: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    same: Callable[[str, np.ndarray, np.ndarray], np.ndarray] = lambda _field, a, b: a == b,
) -> str | None:
    """Compares records with an int64 [n, fields] array of the golden, whose columns are in the records' order."""
    if len(ours) != len(theirs):
        return f"{what}: expected {len(theirs)} rows, got {len(ours)}"
    for column, field in enumerate(ours.dtype.names or ()):
        equal = same(field, ours[field].astype(np.int64), theirs[:, column])
        if not equal.all():
            row = int(np.argmin(equal))
            return f"{what} row {row}, {field}: expected {theirs[row, column]}, got {ours[field][row]}"
    return None
