"""(2N-2):2N structured sparsity on 2:4 sparse tensor cores, for vLLM (arXiv 2603.05232).

Importing this package needs no GPU, no Triton, no compiled code and no torch.
"""

__version__ = "0.3.0"

import sys as _sys
from importlib.machinery import ModuleSpec as _ModuleSpec
from importlib.util import spec_from_file_location as _spec
from pathlib import Path as _Path


class _Clone:
    """A finder of the plugin next to this package in a clone; installations contain the plugin."""

    name, folder = f"{__name__}.vllm_patch", _Path(__file__).resolve().parent.parent / "vllm_patch"

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> _ModuleSpec | None:
        if name != cls.name:
            return None
        return _spec(name, cls.folder / "__init__.py", submodule_search_locations=[str(cls.folder)])


# In a clone, ``python -m vllm...`` imports this package from the working directory instead of the installed one, and
# without the plugin vLLM would silently use its own kernels.  Appended last, so that a plugin inside the package wins.
if (_Clone.folder / "__init__.py").is_file():
    _sys.meta_path.append(_Clone)
