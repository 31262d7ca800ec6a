"""What the releases of SGLang that we know call things."""

from __future__ import annotations

from dataclasses import dataclass

_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"

BACKEND_CLASS = f"{_BACKEND}.DeepseekV4AttnBackend"
MULTI_STEP_CLASS = f"{_BACKEND}.DeepseekV4MultiStepBackend"
REGISTRY = "sglang.srt.layers.attention.attention_registry"
DRAFT_DECODE_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_dsv4_decode_backend"
DRAFT_EXTEND_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_dsv4_prefill_backend"
DRAFT_RUNNER_HOOK = "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner"

OVERRIDDEN = (
    "init_forward_metadata",
    "init_forward_metadata_out_graph",
    "init_forward_metadata_prefill",
    "init_forward_metadata_draft_extend",
    "init_forward_metadata_indexer",
    "init_forward_metadata_for_breakable_cuda_graph_capture",
    "init_forward_metadata_in_graph",
    "on_after_cuda_graph_warmup",
)
"""Methods of SGLang's backend that ours stands in for, or calls. Where one is missing there is nothing to hook."""

MULTI_STEP_OVERRIDDEN = (
    "init_forward_metadata",
    "init_forward_metadata_out_graph",
    "init_forward_metadata_in_graph",
    "on_after_cuda_graph_warmup",
)
"""The same for the backend of the draft steps."""


@dataclass(frozen=True)
class Release:
    """How one release differs from the others.

    Attributes:
        version: of the sglang distribution.
        window_schedule: field of `DSV4AttnMetadata` with the FlashMLA schedule of layers without compression.
        topk_field: its field with the entries that the indexer selects.
        names_ratios: it has a field `present_ratios`, and leaves out what the pool has no ratio for.
    """

    version: str
    window_schedule: str
    topk_field: str
    names_ratios: bool


RELEASES = {
    release.version: release
    for release in (
        Release("0.5.16", "c1_flashmla_metadata", "c4_sparse_topk", names_ratios=False),
        Release("0.5.23", "c0_flashmla_metadata", "index_topk", names_ratios=True),
    )
}


def release_of(version: str) -> Release:
    """The release that `version` names; ValueError for one that nobody has looked at."""
    found = RELEASES.get(version)
    if found is None:
        raise ValueError(f"sglang: expected one of the releases {', '.join(RELEASES)}, got {version}")
    return found
