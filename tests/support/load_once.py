"""Load a checkpoint into vLLM on a GPU and print, as the last line, what that took: ``load_once.py FOLDER``.

JSON: ``seconds`` of vLLM's ``load_model``, which ends when all layers have the form that they are served in;
``before``, ``peak`` and ``after``, the bytes that torch had allocated when it began, at most, and when it ended;
``sparse``, whether the plugin served.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

KV_CACHE = 1 << 30  # bytes; given, so that vLLM does not look for free memory


def main(folder: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model is loaded in this process
    import torch
    from vllm import LLM
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load, found = BaseModelLoader.load_model, {}

    def timed(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        found["before"], began = torch.cuda.memory_allocated(), time.perf_counter()
        model = load(self, *args, **kwargs)
        torch.cuda.synchronize()
        found["seconds"] = time.perf_counter() - began
        found["peak"], found["after"] = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        schemes = (getattr(layer, "scheme", None) for layer in model.modules())
        found["sparse"] = any(type(scheme).__module__.startswith("slidesparse") for scheme in schemes)
        print("\n" + json.dumps(found), flush=True)
        os._exit(0)  # without starting the rest of the engine

    BaseModelLoader.load_model = timed  # type: ignore[method-assign]
    LLM(
        folder,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=KV_CACHE,
        gpu_memory_utilization=0.02,
        max_model_len=1024,
    )


if __name__ == "__main__":
    main(sys.argv[1])
