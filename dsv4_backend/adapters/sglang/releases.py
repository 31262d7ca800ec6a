"""What the releases of SGLang that we know call things."""

from __future__ import annotations

from dataclasses import dataclass

NAME = "dsv4"
"""Of the attention backend, in SGLang."""

_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"

BACKEND_CLASS = f"{_BACKEND}.DeepseekV4AttnBackend"
MULTI_STEP_CLASS = f"{_BACKEND}.DeepseekV4MultiStepBackend"
REGISTRY = "sglang.srt.layers.attention.attention_registry"
DRAFT_DECODE_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_dsv4_decode_backend"
DRAFT_EXTEND_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_dsv4_prefill_backend"
_DRAFT_RUNNER = "sglang.srt.speculative.eagle_draft_cuda_graph_runner"
DRAFT_RUNNER_HOOK = f"{_DRAFT_RUNNER}.EAGLEDraftCudaGraphRunner"

NEEDED = {
    BACKEND_CLASS: (
        "init_forward_metadata",
        "init_forward_metadata_out_graph",
        "init_forward_metadata_prefill",
        "init_forward_metadata_draft_extend",
        "init_forward_metadata_indexer",
        "init_forward_metadata_for_breakable_cuda_graph_capture",
        "init_forward_metadata_in_graph",
        "on_after_cuda_graph_warmup",
    ),
    MULTI_STEP_CLASS: (
        "init_forward_metadata",
        "init_forward_metadata_out_graph",
        "init_forward_metadata_in_graph",
        "on_after_cuda_graph_warmup",
    ),
    "sglang.srt.speculative.draft_utils.DraftBackendFactory": (
        "_create_dsv4_decode_backend",
        "_create_dsv4_prefill_backend",
    ),
    _BACKEND: ("DSV4AttnMetadata", "DSV4Metadata", "FusedCompressMetadata", "_create_flashmla_metadata"),
    _DRAFT_RUNNER: (
        "EAGLEDraftCudaGraphRunner",
        "get_batch_sizes_to_capture",
        "get_draft_recurrent_hidden_state_spec",
        "model_capture_mode",
        "require_gathered_buffer",
    ),
    "sglang.srt.distributed.parallel_state": ("graph_capture",),
    "sglang.srt.model_executor.forward_batch_info": (
        "CaptureHiddenMode",
        "ForwardBatch.mark_forward_metadata_ready",
        "ForwardMode",
    ),
    "sglang.srt.model_executor.forward_context": ("ForwardContext", "forward_context"),
    "sglang.srt.speculative.eagle_info": ("EagleDraftInput",),
}
"""What ours stands in for, or calls, by who has it. Where one is missing SGLang stays as it is."""


@dataclass(frozen=True)
class Release:
    """How one release differs from the others.

    Attributes:
        version: of the sglang distribution.
        window_schedule: field of `DSV4AttnMetadata` with the FlashMLA schedule of layers without compression.
        topk_field: its field with the entries that the indexer selects.
        backend_topk: attribute of the backend with the same number.
        names_ratios: it has a field `present_ratios`, and leaves out what the pool has no ratio for.
    """

    version: str
    window_schedule: str
    topk_field: str
    backend_topk: str
    names_ratios: bool


RELEASES = {
    release.version: release
    for release in (
        Release("0.5.16", "c1_flashmla_metadata", "c4_sparse_topk", "c4_topk", names_ratios=False),
        Release("0.5.23", "c0_flashmla_metadata", "index_topk", "index_topk", names_ratios=True),
    )
}


def release_of(version: str) -> Release:
    """The release that `version` names; ValueError for one that nobody has looked at."""
    found = RELEASES.get(version)
    if found is None:
        raise ValueError(f"sglang: expected one of the releases {', '.join(RELEASES)}, got {version}")
    return found
