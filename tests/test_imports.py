"""Which package may import which: kernels and graph runner stand alone, the backend reaches both late."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest

from layout import INSTALLED_NAME, ROOT

# What stands alone may import these, the standard library and itself.
ALONE = {"dsv4_triton_kernels": {"torch", "triton"}, "dsv4_graph_runner": {"torch"}}
# dsv4_backend may import these from the named files or folders only, and only when a function runs.
LATE = {
    "dsv4_triton_kernels": ("dispatch.py",),
    "dsv4_graph_runner": ("commands", "adapters", "draft_backend.py"),
    "dsv4_bench": ("commands",),
    "dsv4_examples": ("commands",),
    "sglang": ("adapters",),
    "vllm": ("adapters",),
}
# Folders of the repository, which nothing that is installed may reach under their generic names.
GENERIC = {"triton_kernels", "graph_runner", "bench", "tests", "examples"}


@dataclass(frozen=True)
class Import:
    module: str  # the top-level name
    line: int
    late: bool  # inside a function, or for type checkers only


def imports_of(tree: ast.AST, package: str) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, late: bool) -> None:
        for name in _imported_names(node, package):
            found.append(Import(name.split(".")[0], node.lineno, late))
        for field, value in ast.iter_fields(node):
            body_is_late = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            )
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, late or (field == "body" and body_is_late))

    visit(tree, late=False)
    return found


def _imported_names(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [package if node.level else node.module or ""]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        # The name may be an f-string whose leading text names the package.
        text = next((part.value for part in ast.walk(node) if isinstance(part, ast.Constant)), "")
        return [package if text.startswith(".") else text]
    return []


def violations(package: str, path: str, source: str) -> list[str]:
    """What is wrong with the imports of one file of `package`; `path` is relative to the package's folder."""
    found = []
    for each in imports_of(ast.parse(source), package):
        where = f"{package}/{path}:{each.line}: imports {each.module}"
        if each.module in GENERIC:
            found.append(f"{where} under a name that is not installed")
        elif package in ALONE:
            if each.module not in ALONE[package] | {package} | sys.stdlib_module_names:
                found.append(f"{where}, but may only import {', '.join(sorted(ALONE[package]))} and itself")
        elif package == "dsv4_backend" and each.module in LATE:
            if PurePosixPath(path).parts[0] not in LATE[each.module]:
                found.append(f"{where}, which only {', '.join(LATE[each.module])} may")
            elif not each.late:
                found.append(f"{where} outside a function")
    return found


@pytest.mark.parametrize("folder", INSTALLED_NAME)
def test_packages_keep_to_the_arrows(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [
        line
        for path in paths
        for line in violations(INSTALLED_NAME[folder], path.relative_to(ROOT / folder).as_posix(), path.read_text())
    ]
    assert not found, "\n".join(found)


BAD = {
    "kernel imports the backend": ("dsv4_triton_kernels", "planner.py", "from dsv4_backend.reference import planner"),
    "kernel imports the backend late": ("dsv4_triton_kernels", "planner.py", "def f():\n    import dsv4_backend"),
    "kernel imports numpy": ("dsv4_triton_kernels", "planner.py", "import torch, numpy as np"),
    "runner imports triton": ("dsv4_graph_runner", "capture.py", "import triton.language as tl"),
    "runner imports an engine": ("dsv4_graph_runner", "capture.py", "def f():\n    from sglang.srt import x"),
    "runner imports the backend by name": ("dsv4_graph_runner", "runner.py", "importlib.import_module('dsv4_backend')"),
    "backend imports kernels early": ("dsv4_backend", "dispatch.py", "from dsv4_triton_kernels import planner"),
    "a class body runs early": ("dsv4_backend", "dispatch.py", "class A:\n    import dsv4_triton_kernels"),
    "default argument runs early": ("dsv4_backend", "dispatch.py", "def f(x=__import__('dsv4_triton_kernels')): pass"),
    "another file imports kernels": ("dsv4_backend", "planner.py", "def f():\n    import dsv4_triton_kernels"),
    "a namesake in a subfolder": ("dsv4_backend", "reference/dispatch.py", "def f():\n    import dsv4_triton_kernels"),
    "kernels by f-string": ("dsv4_backend", "planner.py", "def f(n):\n    import_module(f'dsv4_triton_kernels.{n}')"),
    "command imports the runner early": ("dsv4_backend", "commands/capture.py", "import dsv4_graph_runner"),
    "planner imports the runner": ("dsv4_backend", "planner.py", "def f():\n    import dsv4_graph_runner"),
    "adapter imports its engine early": ("dsv4_backend", "adapters/sglang.py", "import sglang"),
    "backend imports an engine": ("dsv4_backend", "backend.py", "def f():\n    import vllm"),
    "folder name": ("dsv4_backend", "commands/bench.py", "def f():\n    from bench import planner"),
    "bench by its folder": ("dsv4_bench", "planner.py", "from bench import timing"),
    "typing in the wrong file": ("dsv4_backend", "batch.py", "if TYPE_CHECKING:\n    import dsv4_graph_runner"),
}
GOOD = {
    "kernel": ("dsv4_triton_kernels", "planner.py", "import math\nimport torch\nimport triton\nfrom . import common"),
    "runner": ("dsv4_graph_runner", "runner.py", "import torch\nfrom dsv4_graph_runner.buckets import BucketPolicy"),
    "dispatch": ("dsv4_backend", "dispatch.py", "def f():\n    from dsv4_triton_kernels import planner"),
    "dispatch by f-string": ("dsv4_backend", "dispatch.py", "def f(n):\n    import_module(f'dsv4_triton_kernels.{n}')"),
    "adapter": ("dsv4_backend", "adapters/sglang.py", "class A:\n    def f(self):\n        import sglang"),
    "typing": ("dsv4_backend", "draft_backend.py", "if TYPE_CHECKING:\n    import dsv4_graph_runner"),
    "command": ("dsv4_backend", "commands/bench.py", "def f():\n    from dsv4_bench import planner"),
    "bench": ("dsv4_bench", "planner.py", "from dsv4_bench import timing\nfrom dsv4_triton_kernels import planner"),
    "relative": ("dsv4_backend", "commands/bench.py", "from ..planner import plan_prefill"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_checker_trips(case: tuple[str, str, str]) -> None:
    assert len(violations(*case)) == 1


@pytest.mark.parametrize("case", GOOD.values(), ids=GOOD)
def test_checker_lets_pass(case: tuple[str, str, str]) -> None:
    assert violations(*case) == []
