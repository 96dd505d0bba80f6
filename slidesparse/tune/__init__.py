"""Search for the fastest configuration of each GEMM, and what measuring needs."""
