"""The README and docs: their commands exist and their Python runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dsv4_backend.cli import app
from layout import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(dsv4 [^`\n]+)`")


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def shell_lines(page: Path) -> list[str]:
    text = "".join(blocks(page, "sh")).replace("\\\n", " ")
    return [line.strip() for line in text.splitlines()]


def dsv4_commands() -> list[Any]:
    found = {}
    for page in PAGES:
        lines = [line for line in shell_lines(page) if line.startswith("dsv4 ")]
        for line in lines + INLINE.findall(FENCE.sub("", page.read_text())):
            found.setdefault(line, pytest.param(line, id=f"{page.name}: {line}"))
    return list(found.values())


def problems(line: str, application: typer.Typer = app) -> list[str]:
    """What `dsv4 --help` and its subcommands' contradict in `line`; "a|b" stands for either word."""
    words = shlex.split(line, comments=True)[1:]
    found: list[str] = []

    def check(command: Any, path: list[str], rest: list[str]) -> None:
        if subcommands := getattr(command, "commands", None):
            for name in rest[0].split("|") if rest and not rest[0].startswith("-") else []:
                if name in subcommands:
                    check(subcommands[name], [*path, name], rest[1:])
                else:
                    found.append(f"dsv4 {' '.join(path)}: no subcommand {name}")
            return
        options = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
        used = {word.strip("[]").split("=")[0] for word in rest if word.strip("[]").startswith("--")}
        found.extend(f"dsv4 {' '.join(path)}: no option {option}" for option in sorted(used - options - {"--help"}))
        if CliRunner().invoke(application, [*path, "--help"]).exit_code != 0:
            found.append(f"dsv4 {' '.join(path)} --help fails")

    check(typer.main.get_command(application), [], words)
    return found


def test_setup_commands_are_named() -> None:
    assert {"make demo", "make test"} <= set(shell_lines(README))


@pytest.mark.parametrize("line", dsv4_commands())
def test_commands_exist(line: str) -> None:
    assert problems(line) == []


def test_check_of_commands_trips() -> None:
    application = typer.Typer()
    group = typer.Typer()
    application.add_typer(group, name="bench")

    @group.command()
    def planner(peer: str = "") -> None: ...

    @group.command()
    def kernels() -> None: ...

    assert problems("dsv4 bench planner|kernels", application) == []
    assert problems("dsv4 bench planner --peer DIR  # why", application) == []
    assert problems("dsv4 bench planer", application) == ["dsv4 bench: no subcommand planer"]
    assert problems("dsv4 bench planner --pear DIR", application) == ["dsv4 bench planner: no option --pear"]


@pytest.mark.parametrize("source", blocks(README, "python"))
def test_python_runs(source: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_package_is_the_console_script() -> None:
    done = subprocess.run([sys.executable, "-m", "dsv4_backend", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "capture-test" in done.stdout
