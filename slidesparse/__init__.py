"""(2N-2):2N structured sparsity on 2:4 sparse tensor cores, for vLLM (arXiv 2603.05232).

Importing this package needs no GPU, no Triton, no compiled code and no torch.
"""

__version__ = "0.1.0"
