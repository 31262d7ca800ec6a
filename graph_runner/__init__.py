"""Captures an EAGLE draft loop in CUDA graphs and replays padded batches through it."""
