"""(2N-2):2N structured sparsity on 2:4 sparse tensor cores, for vLLM (arXiv 2603.05232).

Importing this package needs no GPU, no Triton, no compiled code and no torch.
"""

__version__ = "0.1.0"

from pathlib import Path as _Path

_root = _Path(__file__).resolve().parent.parent
if not (_root / __name__ / "vllm_patch").exists() and (_root / "vllm_patch").is_dir():
    # Imported from a clone's folder before what is installed, such as by ``python -m vllm...`` there: the plugin, which
    # installations have in this package, lies beside it, and without it vLLM would go on with its own kernels
    __path__.append(str(_root))
