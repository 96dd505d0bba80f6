"""The hand-written N:M kernels on small odd shapes, to be run where defects are seen::

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/support/sanitize_spmm.py [WORD OF A CASE ...]

The tools racecheck, synccheck and initcheck take it as well.  Tensors get memory of their own, so that the tool knows
where they end.  Exits with 1 when a result is wrong; the tool tells the rest.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # before torch is imported

import sys

import torch
from spmm_cases import SHAPES, integers

from slidesparse.spmm import STRIP, VARIANTS, decompress, spmm

PATTERNS = ((2, 4), (1, 4), (6, 8), (31, 32))


def main() -> int:
    """Run everything; 1 when a result is not what it should be."""
    wrong = 0
    for m, n, k in SHAPES:
        for kept, group in PATTERNS:
            for dtype in (torch.float32, torch.float16):
                for strip in (1, STRIP):
                    name = f"{m} x {n} x {k} at {kept}:{group} {dtype} strip={strip}".replace("torch.", "")
                    if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
                        continue
                    x, weight = integers(m, n, k, kept, group, dtype, strip)
                    expected = (x.double() @ decompress(weight).double().t()).to(dtype)
                    x, weight = x.cuda(), weight.to("cuda")
                    right = all(
                        torch.equal(spmm(x, weight, variant, splits).cpu(), expected)
                        for variant in VARIANTS
                        for splits in (1, 3)
                    )
                    wrong += not right
                    print("right" if right else "WRONG", name, flush=True)
    print(f"{wrong} results are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
