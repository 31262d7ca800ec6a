"""A standalone DeepSeek-V4 compressed-attention backend; so far, plans and metadata of a step on a paged cache."""

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_backend.planner import plan_decode, plan_prefill
from dsv4_backend.plans import CompressPlan, DecodePlan, DecodePlans, PrefillPlan
from dsv4_backend.tables import RequestTables

__version__ = "0.1.0"

__all__ = [
    "AttnMetadata",
    "CacheGeometry",
    "CompressPlan",
    "DSV4Config",
    "DecodePlan",
    "DecodePlans",
    "ForwardMode",
    "MetadataBuilder",
    "PrefillPlan",
    "RawBatch",
    "RequestTables",
    "plan_decode",
    "plan_prefill",
]
