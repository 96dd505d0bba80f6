"""Evaluate a checkpoint as vLLM serves it with the plugin, and compare it with another.

`texts` reads the data, `engine` runs vLLM in a `worker` process, and `perplexity` computes the metrics.
"""
