"""Checkpoints on disk.

`storage` reads and writes safetensors by chunks of rows.  `metadata` is our block in config.json, `w8a8` the
compressed-tensors block around it.  `architectures` says which tensors are linear layers.  `converted` reads back what
a conversion wrote, `inspection` shows and compares checkpoints, `output` makes a new folder appear by one rename, and
`tokens` turns texts into token ids.
"""
