"""Benchmarks behind `dsv4 bench`."""
