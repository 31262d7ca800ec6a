"""A standalone DeepSeek-V4 compressed-attention backend; so far, a paged cache, and plans and metadata of a step."""

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.cache import CacheSize, DSV4Cache, LayerCache
from dsv4_backend.compressor import compress, store_entries, store_window
from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.layouts import EntryLayout, EntryPool
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_backend.page_pool import PagePool
from dsv4_backend.planner import plan_decode, plan_prefill
from dsv4_backend.plans import CompressPlan, DecodePlan, DecodePlans, PrefillPlan
from dsv4_backend.rope import rope_table
from dsv4_backend.tables import RequestTables

__version__ = "0.1.0"

__all__ = [
    "AttnMetadata",
    "CacheGeometry",
    "CacheSize",
    "CompressPlan",
    "DSV4Cache",
    "DSV4Config",
    "DecodePlan",
    "DecodePlans",
    "EntryLayout",
    "EntryPool",
    "ForwardMode",
    "LayerCache",
    "MetadataBuilder",
    "PagePool",
    "PrefillPlan",
    "RawBatch",
    "RequestTables",
    "compress",
    "plan_decode",
    "plan_prefill",
    "rope_table",
    "store_entries",
    "store_window",
]
