"""The pruning methods, which choose the weights to remove and may update the remaining ones.

To add a method, write a module here with a subclass of `slidesparse.methods.method.Method` and add a line to METHODS.
The command line, calibration and conversion then accept its name.  This file needs the standard library only.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slidesparse.methods.method import Method

# name -> "module:class"
METHODS = {
    "sparsegpt": "slidesparse.methods.sparsegpt:SparseGPT",
    "wanda": "slidesparse.methods.wanda:Wanda",
    "magnitude": "slidesparse.methods.data_free:Magnitude",
    "random": "slidesparse.methods.data_free:Random",
}
DEFAULT = "magnitude"
DEFAULT_CALIBRATED = "sparsegpt"  # with calibration data


@cache
def get(name: str) -> Method:
    """Return the method with a name from METHODS."""
    module, _, kind = METHODS[name].partition(":")
    method: Method = getattr(import_module(module), kind)()
    return method
