"""The backend of the draft steps: each step writes its own slots, eager and as a graph replays it."""

from __future__ import annotations

from typing import Any

import pytest
import sglang.srt.layers.attention.deepseek_v4_backend as stock
import torch
from compare import differences
from harness import DRAFTS, STEPS, forward_batch, model_runner, slots, view_of
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.draft_utils import DraftBackendFactory

REQUESTS, LENS = [3, 1, 8], [1000, 128, 2049]


def pair() -> tuple[Any, Any, Any]:
    """A draft model runner, our backend of its draft steps and SGLang's."""
    runner = model_runner(ratios=(0,), drafts=DRAFTS, is_draft=True)
    ours = DraftBackendFactory(runner, 1, STEPS).create_decode_backend()
    return runner, ours, stock.DeepseekV4MultiStepBackend(runner, 1, STEPS)


def draft_slots(runner: Any) -> torch.Tensor:
    return slots(runner, REQUESTS, LENS, [STEPS] * len(LENS))


def test_eager() -> None:
    runner, *backends = pair()
    loc = draft_slots(runner)
    for backend in backends:
        backend.init_forward_metadata(forward_batch(ForwardMode.DECODE, REQUESTS, LENS, loc))
    ours, theirs = ([child.forward_metadata for child in backend.attn_backends] for backend in backends)
    assert ours[-1] is theirs[-1] is None  # the last step runs no forward
    for step in range(STEPS - 1):
        assert differences(ours[step], theirs[step]) == []
        assert ours[step].core_attn_metadata.raw_out_loc.tolist() == loc[step::STEPS].tolist()


@pytest.mark.parametrize("bucket", [3, 4])
@pytest.mark.parametrize("padded_list", [False, True])
def test_graph_replay(bucket: int, padded_list: bool) -> None:
    """Releases pass the live list (0.5.16) or the padded one (0.5.23); both must give each step its slice."""
    runner, *backends = pair()
    ours, theirs = backends
    dummy = view_of(
        forward_batch(ForwardMode.DECODE, [0] * bucket, [1] * bucket, torch.zeros(bucket * STEPS, dtype=torch.int64))
    )
    for backend in backends:
        backend.init_cuda_graph_state(bucket, bucket)
        backend.init_forward_metadata_out_graph(dummy, in_capture=True)
        backend.init_forward_metadata_in_graph(dummy)
        backend.on_after_cuda_graph_warmup()
        backend.init_forward_metadata_in_graph(dummy)
    before = [child.forward_metadata.core_attn_metadata.raw_out_loc.data_ptr() for child in ours.attn_backends[:-1]]

    loc, pad = draft_slots(runner), bucket - len(LENS)
    all_slots = torch.nn.functional.pad(loc, (0, pad * STEPS))
    batch = forward_batch(ForwardMode.DECODE, REQUESTS + [0] * pad, LENS + [1] * pad, all_slots)
    replay = view_of(batch, batch_size=bucket, num_padding=pad, out_cache_loc=all_slots if padded_list else loc)
    for backend in backends:
        backend.init_forward_metadata_out_graph(replay)
        backend.init_forward_metadata_in_graph(view_of(replay, out_cache_loc=all_slots))
    for step in range(STEPS - 1):
        mine, other = (backend.attn_backends[step].forward_metadata for backend in (ours, theirs))
        # SGLang's write slots of a captured draft step are the front of the list of all steps, or older ones.
        assert differences(mine, other, rows=len(LENS), skip=("raw_out_loc",)) == []
        core = mine.core_attn_metadata
        assert core.raw_out_loc.tolist() == all_slots[step::STEPS].tolist()
        assert core.seq_lens_casual[len(LENS) :].tolist() == [1] * pad
        assert core.raw_out_loc.data_ptr() == before[step]
    assert replay.out_cache_loc is (all_slots if padded_list else loc)  # the caller's batch is as it was


def test_a_batch_that_no_bucket_holds_is_refused() -> None:
    runner, ours, _theirs = pair()
    batch = forward_batch(ForwardMode.DECODE, REQUESTS, LENS, draft_slots(runner))
    with pytest.raises(ValueError, match="that init_forward_metadata_out_graph has seen, got 3"):
        ours.init_forward_metadata_in_graph(batch)
    with pytest.raises(ValueError, match="out_cache_loc: expected at most 6 in a bucket of 2, got 9"):
        ours.init_forward_metadata_out_graph(view_of(batch, batch_size=2))


def test_idle_rank_builds_nothing() -> None:
    _runner, ours, _theirs = pair()
    ours.init_forward_metadata(forward_batch(ForwardMode.IDLE, [], [], torch.zeros(0, dtype=torch.int64)))
    assert [child.forward_metadata for child in ours.attn_backends] == [None] * STEPS
