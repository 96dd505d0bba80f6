"""Checkpoints on disk.

`storage` reads and writes safetensors in chunks of rows.  `metadata` is our block in config.json, `w8a8` the
compressed-tensors block around it.  `architectures` finds the linear layers among the tensors.  `converted` reads the
layers of converted checkpoints, `inspection` shows and compares checkpoints, `output` publishes a new folder by one
rename, and `tokens` tokenizes texts.
"""
