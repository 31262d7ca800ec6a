"""A standalone DeepSeek-V4 compressed-attention backend: plans and metadata of a step, a paged cache, attention."""

from dsv4_backend.attention import sparse_attention
from dsv4_backend.backend import DSV4AttnBackend
from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.cache import CacheSize, DSV4Cache, LayerCache
from dsv4_backend.compressor import compress, store_entries, store_window
from dsv4_backend.config import DSV4Config
from dsv4_backend.draft_backend import DSV4DraftBackend
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.indexer import IndexQuery, index_query, index_scores, select_entries, select_topk
from dsv4_backend.layer import DSV4Attention
from dsv4_backend.layouts import EntryLayout, EntryPool
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_backend.page_pool import PagePool
from dsv4_backend.planner import plan_decode, plan_prefill
from dsv4_backend.plans import CompressPlan, DecodePlan, DecodePlans, PrefillPlan
from dsv4_backend.rope import rope_table
from dsv4_backend.step_inputs import StepInputs
from dsv4_backend.tables import RequestTables

__version__ = "0.1.0"

__all__ = [
    "AttnMetadata",
    "CacheGeometry",
    "CacheSize",
    "CompressPlan",
    "DSV4Attention",
    "DSV4AttnBackend",
    "DSV4Cache",
    "DSV4Config",
    "DSV4DraftBackend",
    "DecodePlan",
    "DecodePlans",
    "EntryLayout",
    "EntryPool",
    "ForwardMode",
    "IndexQuery",
    "LayerCache",
    "MetadataBuilder",
    "PagePool",
    "PrefillPlan",
    "RawBatch",
    "RequestTables",
    "StepInputs",
    "compress",
    "index_query",
    "index_scores",
    "plan_decode",
    "plan_prefill",
    "rope_table",
    "select_entries",
    "select_topk",
    "sparse_attention",
    "store_entries",
    "store_window",
]
