"""Makes .venv ready: `python3 .ci/setup_venv.py [EXTRA ...]` installs the project with those extras.

Where the Python that runs this has a torch that is new enough, .venv sees that Python's packages, and only what they
lack is fetched; torch and Triton are not replaced. Elsewhere .venv gets its own torch. PINS in the environment names
requirements that come on top, as in PINS="triton==3.6.0 numpy<2.3".
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup.json"  # {} until a set-up is complete
PINS = os.environ.get("PINS", "").split()
CPU_TORCH = "torch==2.13.0"


def main(extras: list[str]) -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - says it before anything is downloaded
        sys.exit(f"{sys.executable} is too old: set PYTHON to a Python from 3.10 on.")
    if extras[:1] == ["--install"]:
        return install(extras[1:])
    inside = Path(sys.prefix).resolve() == VENV
    inputs = [str(ROOT), *PINS, *map(read, ("pyproject.toml", "setup.py", __file__))]
    key = hashlib.sha256("\n".join(inputs).encode()).hexdigest()
    stamp = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    if stamp.get("key") != key or not (inside or stamp["python"] == sys.executable):
        if inside:
            sys.exit("The active .venv is not up to date and cannot rebuild itself: deactivate it and try again.")
        make_venv()
        stamp = {"key": key, "python": sys.executable, "extras": []}
    elif set(extras) <= set(stamp["extras"]):
        return
    STAMP.write_text("{}")
    result = subprocess.run([VENV_PYTHON, __file__, "--install", *extras])
    if result.returncode:
        sys.exit(f"Setting up {VENV} failed; the reason stands above.")
    STAMP.write_text(json.dumps({**stamp, "extras": sorted({*stamp["extras"], *extras})}))


def read(name: str) -> str:
    return (ROOT / name).read_text()


def make_venv() -> None:
    """Makes an empty .venv, or one that sees the packages of this Python if its torch is usable."""
    if VENV.exists() and not STAMP.exists():
        sys.exit(f"{VENV} was not made by this Makefile: move it away, or remove it with `make clean`.")
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    STAMP.write_text("{}")
    # A .pth file and not system_site_packages, which would skip the packages of this Python when it is itself a venv.
    linked = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")] if torch_is_usable() else []
    has_pip = bool(linked and importlib.util.find_spec("pip"))
    venv.EnvBuilder(symlinks=True, with_pip=not has_pip).create(VENV)
    if linked:
        if not has_pip:  # the setuptools that comes with a new pip up to Python 3.11 would hide this Python's
            subprocess.run([VENV_PYTHON, "-m", "pip", "-qq", "uninstall", "--yes", "setuptools"])
        next(VENV.glob("lib/python*/site-packages")).joinpath("parent.pth").write_text("\n".join(linked))


def torch_is_usable() -> bool:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries does not load
        print(f"{sys.executable} has no torch ({error}): .venv gets its own.", flush=True)
        return False
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    oldest = re.search(r'"torch>=(\d+)\.(\d+)"', read("pyproject.toml"))
    usable = [int(part) for part in found.groups()] >= [int(part) for part in oldest.groups()]
    verdict = "used" if usable else f"older than {'.'.join(oldest.groups())} and not used: .venv gets its own"
    print(f"torch {torch.__version__} of {sys.executable} is {verdict}.", flush=True)
    return usable


def install(extras: list[str]) -> None:
    """Fetches what is missing and installs the project. Runs in .venv's Python, to see what it sees."""
    if not installed("torch") and not gpu_works():
        pip(CPU_TORCH)
    missing = [r for r in requirements(extras) if not satisfied(r)]
    if missing:
        print(f"Fetching {', '.join(dict.fromkeys(r.name for r in missing))}.", flush=True)
        kept = [name for name in ("torch", "triton") if installed(name) and name not in {r.name for r in missing}]
        constraints = VENV / "constraints.txt"
        constraints.write_text("".join(f"{name}=={installed(name)}\n" for name in kept))
        pip("--constraint", str(constraints), *map(str, missing))
    pip("-qq", "--no-build-isolation", "--no-deps", "--editable", str(ROOT))


def requirements(extras: list[str]) -> list:
    from pip._vendor.packaging.requirements import Requirement

    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    project = tomllib.loads(read("pyproject.toml"))
    texts = project["build-system"]["requires"] + project["project"]["dependencies"] + PINS
    texts += [text for extra in extras for text in project["project"]["optional-dependencies"][extra]]
    found = [Requirement(text) for text in texts if not text.startswith(project["project"]["name"])]
    return [r for r in found if r.marker is None or r.marker.evaluate()]


def satisfied(requirement) -> bool:
    version = installed(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpu_works() -> bool:
    return shutil.which("nvidia-smi") is not None and subprocess.run("nvidia-smi", capture_output=True).returncode == 0


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    if subprocess.run(command).returncode:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
