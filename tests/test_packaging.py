"""The wheel: whole, under names of its own, and able to live beside upstream Triton's `triton_kernels`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from layout import INSTALLED_NAME, ROOT


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_NO_INDEX": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


def build(source: Path, into: Path) -> Path:
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", into, source)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy: a build leaves files behind that the next one would pack."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in INSTALLED_NAME:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return build(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and a stand-in for upstream's `triton_kernels` installed side by side."""
    upstream = tmp_path_factory.mktemp("upstream")
    (upstream / "triton_kernels").mkdir()
    (upstream / "triton_kernels" / "__init__.py").write_text("UPSTREAM = True\n")
    (upstream / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='triton_kernels', version='1', packages=['triton_kernels'])\n"
    )
    target = tmp_path_factory.mktemp("site")
    stand_in = build(upstream, tmp_path_factory.mktemp("upstream_wheel"))
    pip("install", "--no-deps", "--target", target, stand_in, wheel)
    return target


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


def test_every_module_is_in_the_wheel(wheel: Path) -> None:
    expected = {
        f"{name}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, name in INSTALLED_NAME.items()
        for path in [*(ROOT / folder).rglob("*.py"), ROOT / folder / "py.typed"]
    }
    packed = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert expected - packed == set(), "not packed; does a folder lack __init__.py?"
    assert {name for name in packed if name.endswith(".py")} <= expected


def test_top_level_names(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names_in(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(INSTALLED_NAME.values())


def test_console_script_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        entry_points = next(name for name in file.namelist() if name.endswith(".dist-info/entry_points.txt"))
        assert re.search(r"^dsv4 = dsv4_backend\.cli:main$", file.read(entry_points).decode(), re.MULTILINE)
        assert any(name.endswith("/licenses/LICENSE") for name in file.namelist())


def test_installs_beside_upstream_triton_kernels(installed: Path, tmp_path: Path) -> None:
    check = """
import sys
sys.path.insert(0, sys.argv[1])
import triton_kernels
assert triton_kernels.UPSTREAM and triton_kernels.__file__.startswith(sys.argv[1]), triton_kernels.__file__
for name in sys.argv[2:]:
    module = __import__(name)
    assert module.__file__.startswith(sys.argv[1]), module.__file__
"""
    command = [sys.executable, "-c", check, str(installed), *INSTALLED_NAME.values()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
