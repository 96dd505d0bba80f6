"""Whole models in vLLM: tokens per second and per joule, with all engines side by side on one GPU."""
