"""SGLang loads us as a plugin, and builds our backends where it builds its own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import sglang.srt.layers.attention.deepseek_v4_backend as stock
from harness import DRAFTS, STEPS, model_runner
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from dsv4_backend.adapters.sglang.backend import backend_class, multi_step_class


def test_registry_builds_ours() -> None:
    backend = ATTENTION_BACKENDS["dsv4"](model_runner())
    assert isinstance(backend, backend_class(stock.DeepseekV4AttnBackend))
    assert isinstance(backend, stock.DeepseekV4AttnBackend)
    assert backend.dsv4_source.ratios == (4, 128)
    assert backend.use_captured_forward_metadata_for_breakable_cuda_graph
    assert backend.supports_ragged_verify_graph
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_draft_factories_build_ours() -> None:
    runner = model_runner(ratios=(0,), drafts=DRAFTS, is_draft=True)
    factory = DraftBackendFactory(runner, 1, STEPS)
    decode, extend = factory.create_decode_backend(), factory.create_draft_extend_backend()
    assert isinstance(decode, multi_step_class(stock.DeepseekV4MultiStepBackend))
    assert isinstance(decode, stock.DeepseekV4MultiStepBackend)
    assert isinstance(extend, backend_class(stock.DeepseekV4AttnBackend))
    assert isinstance(extend, stock.DeepseekV4AttnBackend)
    assert decode.decode_attention_backend_str == extend.prefill_attention_backend_str == "dsv4"
    assert decode.dsv4_source.ratios == extend.dsv4_source.ratios == ()
    assert len(decode.attn_backends) == STEPS


def test_draft_runner_is_ours() -> None:
    assert eagle_worker_v2.EAGLEDraftCudaGraphRunner.__name__ == "Dsv4DraftGraphRunner"


def test_a_model_that_we_do_not_serve_keeps_its_backend(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = model_runner()
    runner.hisparse_coordinator = object()
    with caplog.at_level(logging.WARNING):
        backend = ATTENTION_BACKENDS["dsv4"](runner)
    assert type(backend) is stock.DeepseekV4AttnBackend
    assert "got HiSparse" in caplog.text
    monkeypatch.setenv("DSV4_BACKEND_STRICT", "1")
    with pytest.raises(ValueError, match="got HiSparse"):
        ATTENTION_BACKENDS["dsv4"](runner)


PROBE = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
from importlib import metadata
version = metadata.version
metadata.version = lambda name: {version!r} if name == "sglang" and {version!r} else version(name)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
print("FACTORY", ATTENTION_BACKENDS["dsv4"].__module__)
try:
    ATTENTION_BACKENDS["dsv4"](None)
except Exception as error:
    print("CREATE", error)
"""


@pytest.mark.parametrize(
    ("environment", "version", "expected"),
    [
        ({"DSV4_BACKEND": "off"}, "", ("off (DSV4_BACKEND=off)", "FACTORY sglang.")),
        ({}, "0.5.99", ("SGLang's own path is used", "got 0.5.99", "FACTORY sglang.")),
        ({"DSV4_BACKEND_STRICT": "1"}, "0.5.99", ("CREATE dsv4-backend: sglang: expected one of", "got 0.5.99")),
    ],
    ids=["off", "unknown release", "unknown release, strict"],
)
def test_switches(environment: dict[str, str], version: str, expected: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE.replace("{version!r}", repr(version))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    assert not [text for text in expected if text not in output], output
