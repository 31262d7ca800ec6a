"""Folder X installs as `dsv4_X`, its subpackages with it. Everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

PACKAGE_DIR = {
    "dsv4_backend": "dsv4_backend",
    "dsv4_triton_kernels": "triton_kernels",
    "dsv4_graph_runner": "graph_runner",
    "dsv4_bench": "bench",
    "dsv4_examples": "examples",
}

setup(
    package_dir=PACKAGE_DIR,
    packages=[
        package
        for name, folder in PACKAGE_DIR.items()
        for package in (name, *(f"{name}.{sub}" for sub in find_packages(folder)))
    ],
)
