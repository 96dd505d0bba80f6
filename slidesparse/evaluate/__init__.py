"""Measure the quality of a checkpoint as vLLM serves it with the plugin, compared with another checkpoint.

`texts` reads the data, `engine` starts vLLM in a process of its own, where `worker` runs, and `perplexity` and
`embedding` compute figures with the bootstrap `intervals` around them.
"""
