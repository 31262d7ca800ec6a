"""Kernels that fill the cache, and those that read it, under NVIDIA's compute-sanitizer, where the machine has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backends import INTERPRET

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRET, reason="the interpreter runs nothing on a GPU")
@pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_steps_are_clean(tool: str) -> None:
    script = Path(__file__).with_name("sanitizer_steps.py")
    # Memory from the driver itself: the caching allocator would hide reads past a tensor.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [str(SANITIZER), "--tool", tool, "--error-exitcode", "9", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
