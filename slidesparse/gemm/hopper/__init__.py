"""Our own sparse kernels for Hopper."""
