"""The place of the standalone CUDA-graph runner; nothing is here yet."""
