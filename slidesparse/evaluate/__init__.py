"""Evaluate a checkpoint as vLLM serves it with the plugin, and compare it with another.

`engine` runs vLLM in a `worker` process, and `perplexity` reads the data and computes the metrics.
"""
