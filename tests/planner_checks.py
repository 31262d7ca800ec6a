"""What the planner tests compare plans with."""

from __future__ import annotations

import numpy as np
import pytest

import dsv4_backend as d4
from planner_oracle import Answer, Oracle, compress_bytes, write_bytes
from strategies import Batch

GEOM = d4.CacheGeometry()
SPECULATIVE = d4.CacheGeometry.for_drafts(4)
RATIO_CHOICES = [(4, 128), (128, 4), (4,), (128,), ()]
each_ratio_choice = pytest.mark.parametrize("ratios", RATIO_CHOICES, ids=str)


def contents(plan: d4.PrefillPlan | d4.DecodePlans) -> dict[str, object]:
    """Everything that a plan holds."""
    found: dict[str, object] = {name: tensor.cpu().numpy().tobytes() for name, tensor in plan.tensors()}
    found["error"] = plan.error.tolist()
    if isinstance(plan, d4.PrefillPlan):
        found["header"] = plan.header.tolist()
    return found


def addresses(plan: d4.PrefillPlan | d4.DecodePlans) -> list[int]:
    return [tensor.data_ptr() for tensor in (plan.error, *(tensor for _, tensor in plan.tensors()))]


def check_prefill(plan: d4.PrefillPlan, answers: dict[int, Answer], batch: Batch) -> None:
    """Every byte of the lists, the header, and no error bit that nothing caused."""
    for ratio, answer in answers.items():
        lists = plan.ratio(ratio)
        np.testing.assert_array_equal(lists.compress.cpu().numpy(), compress_bytes(answer, batch.num_rows), f"c{ratio}")
        np.testing.assert_array_equal(lists.write.cpu().numpy(), write_bytes(answer, batch.num_rows), f"c{ratio}")
    counts = [len(rows) for r in (4, 128) for rows in (answers[r].compress, answers[r].write)]
    assert plan.header.tolist() == answers[4].header + counts
    check_error_bits(plan, answers)


def check_error_bits(plan: d4.PrefillPlan | d4.DecodePlans, answers: dict[int, Answer]) -> None:
    causes = answers[4].errors | answers[128].errors
    assert bool(plan.error.item()) == bool(causes)
    assert plan.error.item() & ~causes == 0


def prefill_answers(batch: Batch) -> dict[int, Answer]:
    oracle = Oracle(batch.pool.req_to_token, batch.pool.full_to_swa, batch.geom)
    return {
        ratio: oracle.prefill(ratio, batch.seq_lens, batch.extend_lens, batch.reqs, batch.num_rows)
        for ratio in (4, 128)
    }
