"""The cost of pruning two language models that people use, measured as vLLM serves them."""
