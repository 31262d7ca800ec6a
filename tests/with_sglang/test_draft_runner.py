"""SGLang's draft loop in our graph runner: the tokens of SGLang's own loop, padded and not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import DRAFTS, STEPS, forward_batch, model_runner, slots
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.speculative import eagle_draft_cuda_graph_runner, eagle_worker_v2
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_info import EagleDraftInput

VOCAB, HIDDEN = 211, 16
BUCKETS = [2, 4]


class ToyModel:
    """A draft model whose tokens depend on everything that a step is given, write slots included."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head = torch.randn(HIDDEN, VOCAB, generator=generator)
        self.seen: list[list[int]] = []

    def forward(self, batch: Any) -> Any:
        core = get_attn_backend().forward_metadata.core_attn_metadata
        # The slot is where the step's metadata says, as the K store reads it.
        assert core.raw_out_loc.tolist() == batch.out_cache_loc.tolist()
        self.seen.append(batch.out_cache_loc.tolist())
        mixed = batch.positions % 7 + core.seq_lens_casual % 5 + core.swa_page_indices.sum(1) % 11
        hidden = torch.tanh(batch.spec_info.hidden_states + self.embedding[batch.input_ids] + mixed[:, None] / 9)
        return SimpleNamespace(logits_output=LogitsProcessorOutput(hidden @ self.head, hidden_states=hidden))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of SGLang's draft worker as its draft loop and a runner read."""
    runner = model_runner(ratios=(0,), drafts=DRAFTS, is_draft=True)
    toy = ToyModel()
    runner.forward, runner.toy = toy.forward, toy
    runner.model_config.hf_config = SimpleNamespace(architectures=["DeepseekV4ForCausalLMNextN"])
    runner.model_config.vocab_size = VOCAB
    runner.model_config.model_is_mrope = False
    engine = eagle_draft_cuda_graph_runner
    monkeypatch.setattr(engine, "get_batch_sizes_to_capture", lambda _runner: (BUCKETS, []))
    monkeypatch.setattr(engine, "get_draft_recurrent_hidden_state_spec", lambda _runner: (HIDDEN, torch.float32))
    worker = SimpleNamespace(
        topk=1,
        speculative_num_steps=STEPS,
        speculative_num_draft_tokens=STEPS + 1,
        hot_token_id=None,
        index_share_for_mtp_iteration=False,
        seed_dsa_topk_from_draft_extend=False,
        device="cpu",
        server_args=SimpleNamespace(),
        draft_runner=runner,
        draft_attn_backend=DraftBackendFactory(runner, 1, STEPS).create_decode_backend(),
    )
    eagle_worker_v2.EagleDraftWorker._rebuild_topk1_chain_buffers(worker)
    return worker


def draft_batch(worker: Any, requests: list[int], lens: list[int]) -> Any:
    generator = torch.Generator().manual_seed(len(requests))
    size = len(requests)
    spec = EagleDraftInput(
        topk_p=torch.rand(size, 1, generator=generator),
        topk_index=torch.randint(0, VOCAB, (size, 1), generator=generator),
        hidden_states=torch.randn(size, HIDDEN, generator=generator),
    )
    loc = slots(worker.draft_runner, requests, lens, [STEPS] * size)
    batch = forward_batch(ForwardMode.DECODE, requests, lens, loc, spec_info=spec)
    batch.positions, batch.input_ids = torch.tensor(lens), None
    return batch


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_same_tokens_as_the_draft_loop(worker: Any, size: int) -> None:
    requests, lens = [3, 1, 8, 5][:size], [1000, 128, 2049, 511][:size]
    runner = eagle_worker_v2.EAGLEDraftCudaGraphRunner(worker)
    assert type(runner).__name__ == "Dsv4DraftGraphRunner"
    batch = draft_batch(worker, requests, lens)
    before = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    contents = {name: value.clone() for name, value in before.items()}
    assert runner.can_run_graph(batch)
    worker.draft_runner.toy.seen.clear()
    parents, chosen, tokens, probabilities = runner.execute(batch)
    padded = worker.draft_runner.toy.seen.copy()
    assert probabilities is None
    for name, value in before.items():
        assert getattr(batch, name) is value, name
        assert torch.equal(value, contents[name]), name

    again = draft_batch(worker, requests, lens)
    worker.draft_attn_backend.init_forward_metadata(again)
    worker.draft_runner.toy.seen.clear()
    expected = eagle_worker_v2.EagleDraftWorker.draft_forward(worker, again)
    assert tokens.tolist() == expected[2].tolist()
    assert parents.tolist() == expected[0].tolist()
    assert chosen.tolist() == expected[1].tolist()
    pad = [0] * (min(b for b in BUCKETS if b >= size) - size)
    assert padded == [live + pad for live in worker.draft_runner.toy.seen]


def test_a_batch_above_the_buckets_is_left_to_sglang(worker: Any) -> None:
    runner = eagle_worker_v2.EAGLEDraftCudaGraphRunner(worker)
    assert not runner.can_run_graph(draft_batch(worker, [1, 2, 3, 4, 5], [9, 8, 7, 6, 5]))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("hot_token_id", torch.zeros(1), "a draft vocabulary of its own"),
        ("topk", 2, "drafts with 2 branches"),
        ("draft_attn_backend", SimpleNamespace(), ""),  # another model: not worth a word
    ],
    ids=["vocabulary", "branches", "not ours"],
)
def test_other_drafts_get_sglangs_runner(
    worker: Any, field: str, value: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(worker, field, value)
    # SGLang's own runner wants a GPU, and fails: that it was asked for is what counts.
    with caplog.at_level(logging.WARNING), pytest.raises(Exception) as raised:  # noqa: PT011
        eagle_worker_v2.EAGLEDraftCudaGraphRunner(worker)
    assert reason in caplog.text if reason else not caplog.text
    assert "dsv4" not in str(raised.value)
