"""The methods of SGLang's backend that ours stands in for. Everything else of it stays: life cycle, kernels, graphs.

`adopt` makes a backend that SGLang built one of ours. The classes come into being then, on top of SGLang's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from dsv4_backend.adapters.sglang import batches
from dsv4_backend.adapters.sglang.source import MetadataSource

NOT_OURS = ("cp_metadata", "dspark_block_size", "dspark_swa_buffers", "swa_replay_start")
"""Arguments of a prompt step that SGLang builds itself: rows split over ranks, and what other models need."""


@cache
def backend_class(base: Any) -> type:
    """SGLang's DeepseekV4AttnBackend, `base`, with our metadata."""

    class Dsv4AttnBackend(base):
        """A step's metadata is ours."""

        dsv4_source: MetadataSource
        _dsv4_capturing_prefill = False
        _dsv4_built: tuple[Any, Any] = (None, None)

        def init_forward_metadata(self, forward_batch: Any) -> None:
            source = self.dsv4_source
            idle = forward_batch.forward_mode.is_idle()
            with source.building_eagerly():
                if idle and not self.mtp_enabled:
                    self.forward_metadata = source.idle(forward_batch.out_cache_loc.shape[0])
                else:
                    super().init_forward_metadata(forward_batch)

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            self.dsv4_source.follow_tables(in_capture)
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            metadata = self.forward_metadata
            if in_capture and hasattr(metadata, "out_cache_loc"):  # a graph is going to build it
                self.dsv4_source.prebuild(metadata)

        def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
            metadata = self.forward_metadata
            if hasattr(metadata, "out_cache_loc"):  # only the inputs, as a graph keeps them
                build = self.dsv4_source.verify if hasattr(metadata, "extend_seq_lens") else self.dsv4_source.decode
                self.forward_metadata = build(metadata)
                self._dsv4_built = metadata, self.forward_metadata
            elif not hasattr(metadata, "dsv4_complete"):
                super().init_forward_metadata_in_graph(forward_batch)

        def on_after_cuda_graph_warmup(self) -> None:
            super().on_after_cuda_graph_warmup()
            inputs, built = self._dsv4_built
            if built is not None and self.forward_metadata is built:
                self.forward_metadata = inputs  # the capture records the build again

        def init_forward_metadata_prefill(
            self,
            max_seq_len: int,
            req_pool_indices: torch.Tensor,
            seq_lens: torch.Tensor,
            seq_lens_cpu: Any,
            out_cache_loc: torch.Tensor,
            num_tokens: int,
            extend_seq_lens: torch.Tensor,
            extend_seq_lens_cpu: Any,
            *args: Any,
            use_prefill_cuda_graph: bool = False,
            **kwargs: Any,
        ) -> Any:
            if any(kwargs.get(name) is not None for name in NOT_OURS):
                stock = super().init_forward_metadata_prefill
                given = (max_seq_len, req_pool_indices, seq_lens, seq_lens_cpu, out_cache_loc, num_tokens)
                lens = (extend_seq_lens, extend_seq_lens_cpu)
                return stock(*given, *lens, *args, use_prefill_cuda_graph=use_prefill_cuda_graph, **kwargs)
            source = self.dsv4_source
            batch = batches.extend_batch(
                req_pool_indices,
                seq_lens,
                extend_seq_lens,
                out_cache_loc,
                int(sum(extend_seq_lens_cpu)),
                source.longest,
            )
            return source.extend(
                batch,
                (list(seq_lens_cpu), list(extend_seq_lens_cpu)),
                int(max_seq_len),
                in_graph=use_prefill_cuda_graph,
                own_memory=self._dsv4_capturing_prefill,
            )

        def init_forward_metadata_draft_extend(
            self,
            req_pool_indices: torch.Tensor,
            seq_lens: torch.Tensor,
            num_tokens_per_req: int,
            out_cache_loc: torch.Tensor | None = None,
        ) -> Any:
            if out_cache_loc is None:
                out_cache_loc = torch.zeros(0, dtype=torch.int64, device=req_pool_indices.device)
            batch = batches.draft_extend_batch(req_pool_indices, seq_lens, num_tokens_per_req, out_cache_loc)
            return self.dsv4_source.draft_extend(batch)

        def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: Any) -> Any:
            self._dsv4_capturing_prefill = True
            try:
                return super().init_forward_metadata_for_breakable_cuda_graph_capture(forward_batch)
            finally:
                self._dsv4_capturing_prefill = False

    return Dsv4AttnBackend


@cache
def multi_step_class(base: Any) -> type:
    """SGLang's DeepseekV4MultiStepBackend, `base`, with our metadata."""

    class Dsv4MultiStepBackend(base):
        """All draft steps that run a forward come from one launch.

        Step i writes slots i of the requests; the last step only samples, and its backend has no metadata.
        """

        dsv4_source: MetadataSource
        dsv4_inputs: dict[int, batches.DraftInputs]

        def init_forward_metadata(self, forward_batch: Any) -> None:
            if self.speculative_num_steps <= 1 or forward_batch.forward_mode.is_idle():
                return
            with self.dsv4_source.building_eagerly():
                self._dsv4_build(
                    forward_batch.req_pool_indices, forward_batch.seq_lens, forward_batch.out_cache_loc.contiguous()
                )

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            steps = self.speculative_num_steps
            if steps <= 1:
                return
            self.dsv4_source.follow_tables(in_capture)
            size = int(forward_batch.batch_size)
            inputs = self.dsv4_inputs.get(size)
            if inputs is None:
                device = forward_batch.seq_lens.device
                inputs = self.dsv4_inputs[size] = batches.DraftInputs.empty(size, steps, device)
            inputs.load(forward_batch)
            if in_capture:
                self.init_forward_metadata_in_graph(forward_batch)

        def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
            if self.speculative_num_steps <= 1:
                return
            inputs = self.dsv4_inputs.get(int(forward_batch.batch_size))
            if inputs is None:
                raise ValueError(
                    "batch_size: expected one that init_forward_metadata_out_graph has seen, got "
                    f"{forward_batch.batch_size}"
                )
            self._dsv4_build(inputs.req_pool_indices, inputs.seq_lens, inputs.out_cache_loc)

        def on_after_cuda_graph_warmup(self) -> None:
            """Nothing: what a graph records makes the metadata, schedules included, anew."""

        def _dsv4_build(self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor) -> None:
            batch = batches.draft_batch(req_pool_indices, seq_lens, slots, self.speculative_num_steps, self.topk)
            steps = self.dsv4_source.draft_steps(batch)
            for child, metadata in zip(self.attn_backends, [*steps, None], strict=True):
                child.forward_metadata = metadata

    return Dsv4MultiStepBackend


def adopt(backend: Any, source: MetadataSource) -> Any:
    """`backend` as one of ours, with its metadata from `source`.

    Its class becomes a subclass of what it was, so that `isinstance` holds, and whatever its factory set stays.
    """
    is_multi_step = hasattr(backend, "attn_backends")
    if is_multi_step:
        source.expect_window_only()
    base: Any = type(backend)
    backend.__class__ = (multi_step_class if is_multi_step else backend_class)(base)  # may raise: so it comes first
    backend.dsv4_source = source
    if is_multi_step:
        backend.dsv4_inputs = {}
    return backend
