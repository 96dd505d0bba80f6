"""Accuracy protocols: what pruning costs, measured through vLLM."""
