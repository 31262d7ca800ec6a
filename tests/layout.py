"""The folders that are installed, and under which name."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALLED_NAME = {
    "dsv4_backend": "dsv4_backend",
    "triton_kernels": "dsv4_triton_kernels",
    "graph_runner": "dsv4_graph_runner",
    "bench": "dsv4_bench",
    "examples": "dsv4_examples",
}
