"""The Triton kernels of backends that call a GEMM library, one per file: `quant_slide` and `dequant_bias`.

Bit-identical to `slidesparse.reference` with ``arithmetic="cuda"`` on a GPU; Triton's interpreter (TRITON_INTERPRET=1)
rounds sums of products and bfloat16 a little differently.  This package needs neither Triton nor a GPU; its modules
need Triton when imported, and a GPU (or the interpreter) when called.
"""
