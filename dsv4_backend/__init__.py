"""A standalone DeepSeek-V4 compressed-attention backend; so far, compression plans for a paged cache."""

from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.planner import plan_decode, plan_prefill
from dsv4_backend.plans import CompressPlan, DecodePlan, DecodePlans, PrefillPlan
from dsv4_backend.tables import RequestTables

__version__ = "0.1.0"

__all__ = [
    "CacheGeometry",
    "CompressPlan",
    "DecodePlan",
    "DecodePlans",
    "PrefillPlan",
    "RequestTables",
    "plan_decode",
    "plan_prefill",
]
