"""Makes .venv-sglang ready: SGLang on a CPU, with the torch and the test tools of .venv, which must be set up already.

Exit status 75: the packages cannot be had here, so the tests with SGLang cannot run. Anything else that fails is 1.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-sglang"
STAMP = VENV / "setup.sha256"
REQUIREMENTS = Path(__file__).with_name("sglang_requirements.txt")
TRITON = "triton==3.6.0"  # NumPy in the requirements is the newest that its interpreter works with
UNAVAILABLE = 75


def main() -> None:
    python = VENV / "bin" / "python"
    inputs = (str(ROOT), sys.version, TRITON, *(p.read_text() for p in (REQUIREMENTS, Path(__file__))))
    key = hashlib.sha256("\n".join(inputs).encode()).hexdigest()
    if STAMP.exists() and STAMP.read_text() == key:
        return
    if VENV.exists() and not STAMP.exists():
        sys.exit(f"{VENV} was not made by this Makefile: move it away, or remove it with `make clean`.")
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    STAMP.write_text("")
    venv.EnvBuilder(symlinks=True, with_pip=True).create(VENV)
    subprocess.run([python, "-m", "pip", "-qq", "uninstall", "--yes", "setuptools"])  # that of .venv is newer
    next(VENV.glob("lib/python*/site-packages")).joinpath("tools.pth").write_text("\n".join(tool_paths()))
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    if subprocess.run([*pip, "--requirement", REQUIREMENTS, TRITON]).returncode:
        shutil.rmtree(VENV)
        print("SKIPPED: the tests with SGLang. Its packages cannot be had here; the reason stands above.", flush=True)
        sys.exit(UNAVAILABLE)
    subprocess.run([*pip, "--no-build-isolation", "--editable", ROOT], check=True)
    STAMP.write_text(key)


def tool_paths() -> list[str]:
    """Where .venv finds its packages: its own folder, and those of the Python that it was made from, if any."""
    own = next((ROOT / ".venv").glob("lib/python*/site-packages"))
    parent = own / "parent.pth"
    return [str(own), *(parent.read_text().splitlines() if parent.exists() else [])]


if __name__ == "__main__":
    main()
