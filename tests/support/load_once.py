"""Load a checkpoint into vLLM on a GPU and print its time and memory as the last line: ``load_once.py FOLDER``.

The line is JSON: ``seconds`` of vLLM's ``load_model``, which includes packing; ``before``, ``peak`` and ``after``, the
bytes that torch had allocated at its start, at most, and at its end; ``sparse``, whether the plugin served.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

# The size of the KV cache, in bytes, is set, so that vLLM does not measure free memory
MEMORY = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.02}


def main(folder: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model is loaded in this process
    import torch
    from vllm import LLM
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load, report = BaseModelLoader.load_model, {}

    def timed(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        report["before"], began = torch.cuda.memory_allocated(), time.perf_counter()
        model = load(self, *args, **kwargs)
        torch.cuda.synchronize()
        report["seconds"] = time.perf_counter() - began
        report["peak"], report["after"] = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        schemes = (getattr(layer, "scheme", None) for layer in model.modules())
        report["sparse"] = any(type(scheme).__module__.startswith("slidesparse") for scheme in schemes)
        print("\n" + json.dumps(report), flush=True)
        os._exit(0)  # without starting the rest of the engine

    BaseModelLoader.load_model = timed  # type: ignore[method-assign]
    LLM(folder, enforce_eager=True, skip_tokenizer_init=True, max_model_len=1024, **MEMORY)


if __name__ == "__main__":
    main(sys.argv[1])
