"""The tests of this folder need SGLang: `make test-sglang`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    """SGLang's own loader finds our entry point and runs it."""
    from harness import stub_what_needs_a_gpu
    from sglang.srt.plugins import load_plugins

    stub_what_needs_a_gpu()
    load_plugins()
