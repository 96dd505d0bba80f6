"""Checkpoints on disk.

`storage` reads and writes safetensors in chunks of rows.  `metadata` is our block in config.json, `w8a8` the
compressed-tensors block around it.  `skeleton` asks transformers for the modules of a model and the names of their
tensors.  `converted` reads the layers of converted checkpoints, `inspection` shows them, `output` publishes a new
folder by one rename, and `tokens` tokenizes texts.
"""
