"""Pruning with calibration data: which weights go, and how the others make up for them.

A decoder layer (or encoder layer) at a time, from safetensors: `models` and `forward` run it, `hessian` gathers what
its linear layers see, `sparsegpt` and `wanda` prune them, `pipeline` goes through the model and publishes each layer.
"""
