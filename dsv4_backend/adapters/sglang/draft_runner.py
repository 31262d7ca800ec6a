"""SGLang's EAGLE draft graph runner, with dsv4_graph_runner inside."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch

from dsv4_backend.adapters.sglang.draft_steps import DraftMetadata, DraftModel
from dsv4_backend.adapters.sglang.fallback import give_up


def runner_class(stock: Any) -> type:
    """The class to put in the place of SGLang's `stock` EAGLEDraftCudaGraphRunner.

    Constructed for a draft that it does not serve it gives a runner of `stock`, with one warning; for a backend that
    is not ours, as another model has it, without.
    """

    class Dsv4DraftGraphRunner(stock):
        def __new__(
            cls, eagle_worker: Any, *, draft_attn_backend: Any = None, speculative_num_steps: int | None = None
        ) -> Any:
            backend = eagle_worker.draft_attn_backend if draft_attn_backend is None else draft_attn_backend
            if hasattr(backend, "dsv4_source"):  # else another model, or a backend whose refusal was logged
                reason = _why_not(eagle_worker, sys.modules[stock.__module__])
                if not reason:
                    return object.__new__(cls)
                give_up(ValueError(f"draft graph runner: expected drafts that ours serves, got {reason}"))
            options = {"draft_attn_backend": draft_attn_backend, "speculative_num_steps": speculative_num_steps}
            return stock(eagle_worker, **options)

        def __init__(
            self, eagle_worker: Any, *, draft_attn_backend: Any = None, speculative_num_steps: int | None = None
        ) -> None:
            backend = eagle_worker.draft_attn_backend if draft_attn_backend is None else draft_attn_backend
            self.eagle_worker = eagle_worker
            self.model_runner = draft_model_runner(eagle_worker)
            self.draft_attn_backend = backend
            self.topk = 1
            self.speculative_num_steps = speculative_num_steps or eagle_worker.speculative_num_steps
            self._make_runner(sys.modules[stock.__module__])

        def _make_runner(self, engine: Any) -> None:
            from dsv4_graph_runner import BucketPolicy, EagleDraftGraphRunner

            runner = self.model_runner
            hidden_size, hidden_dtype = engine.get_draft_recurrent_hidden_state_spec(runner)
            sizes = engine.get_batch_sizes_to_capture(runner)[0]
            self.capture_bs, self.max_bs = list(sizes), max(sizes)
            # Of a chain nothing is left to choose: the same for all batches.
            self._chosen = torch.arange(self.speculative_num_steps, device=runner.device).repeat(self.max_bs, 1)
            self.runner = EagleDraftGraphRunner(
                DraftModel(runner, _attend_with),
                DraftMetadata(self.draft_attn_backend, _new_batch),
                num_steps=self.speculative_num_steps,
                hidden_size=hidden_size,
                hidden_dtype=hidden_dtype,
                buckets=BucketPolicy(sizes=sizes),
                device=runner.device,
                guard="off",  # the region is SGLang's model, which is not ours to judge
            )
            with _capturing(engine, str(runner.device)):
                self.runner.capture()

        def can_run_graph(self, forward_batch: Any) -> bool:
            """Whether a bucket serves this batch."""
            spec = forward_batch.spec_info
            if getattr(spec, "draft_probs", None) is not None or (getattr(spec, "num_tokens_per_req", -1) or 0) > 1:
                return False
            try:
                batch = _draft_batch(forward_batch)
            except (AttributeError, ValueError):  # a draft input without what a chain begins with
                return False
            return bool(self.runner.can_run(batch)[0])

        def execute(self, forward_batch: Any) -> tuple[Any, Any, Any, None]:
            """Parents, indices of the chosen tokens, the tokens: [B, num_steps] each; no probabilities."""
            output = self.runner.replay(_draft_batch(forward_batch))
            return output.parents, self._chosen[: len(output.parents)], output.draft_tokens, None

    return Dsv4DraftGraphRunner


def _why_not(eagle_worker: Any, engine: Any) -> str:
    """Why this draft needs SGLang's own runner, or ""."""
    try:
        return next((what for found, what in _unserved(eagle_worker, engine) if found), "")
    except Exception as error:  # a release that is not as we know it
        return f"{type(error).__name__}: {error}"


def _unserved(eagle_worker: Any, engine: Any) -> Iterator[tuple[Any, str]]:
    """What ours does not serve, and whether it is the case."""
    runner = draft_model_runner(eagle_worker)
    yield eagle_worker.topk != 1, f"drafts with {eagle_worker.topk} branches"
    yield getattr(eagle_worker, "hot_token_id", None) is not None, "a draft vocabulary of its own"
    yield getattr(eagle_worker, "index_share_for_mtp_iteration", False), "an indexer shared by draft steps"
    yield getattr(runner.model_config, "model_is_mrope", False), "positions of several dimensions"
    yield _samples(engine), "sampled drafts"
    gathers = engine.require_gathered_buffer
    arguments = (runner.server_args,) if inspect.signature(gathers).parameters else ()
    yield gathers(*arguments), "batches that are gathered over ranks"


def draft_model_runner(eagle_worker: Any) -> Any:
    """The model runner of the draft worker; releases name it differently."""
    found = getattr(eagle_worker, "draft_runner", None)
    return eagle_worker.model_runner if found is None else found


def _samples(engine: Any) -> bool:
    get_spec = getattr(engine, "get_spec", None)
    return bool(get_spec is not None and get_spec().speculative_use_rejection_sampling)


def _draft_batch(forward_batch: Any) -> Any:
    from dsv4_graph_runner import DraftBatch

    spec = forward_batch.spec_info
    return DraftBatch(
        forward_batch.req_pool_indices,
        forward_batch.seq_lens,
        forward_batch.positions,
        forward_batch.out_cache_loc,
        spec.topk_p,
        spec.topk_index,
        spec.hidden_states,
        forward_batch.seq_lens_cpu,
    )


def _new_batch(inputs: Any) -> Any:
    """A ForwardBatch over the tensors of a bucket, as SGLang's draft steps see it."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    spec = EagleDraftInput(
        topk_p=inputs.topk_p,
        topk_index=inputs.topk_index,
        hidden_states=inputs.hidden_states,
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=inputs.batch_size,
        input_ids=None,
        req_pool_indices=inputs.req_pool_indices,
        seq_lens=inputs.seq_lens,
        seq_lens_cpu=inputs.seq_lens_cpu,
        seq_lens_sum=inputs.seq_lens_sum,
        out_cache_loc=inputs.out_cache_loc,
        positions=inputs.positions,
        spec_info=spec,
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )
    batch.mark_forward_metadata_ready()
    return batch


@contextlib.contextmanager
def _attend_with(backend: Any, forward_batch: Any) -> Iterator[None]:
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    with forward_context(ForwardContext(attn_backend=backend)):
        yield


@contextlib.contextmanager
def _capturing(engine: Any, device: str) -> Iterator[None]:
    """SGLang's own state around a capture: its communicators need to know."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine.model_capture_mode())
        if device.startswith("cuda"):
            from sglang.srt.distributed.parallel_state import graph_capture

            stack.enter_context(graph_capture())
        yield
