"""Build a model in vLLM without its weights, to see what the server would make of every layer of a checkpoint.

A program, started by `slidesparse.serving`.  The model is built from vLLM's own classes and our quantization config, as
the server does, but with parameters on the device ``meta``.  Then vLLM's own ``load_weights`` is given every tensor of
the checkpoint, on ``meta``, too: the calls of the parameters' loaders tell which tensor goes into which layer, whatever
vLLM calls the layer.

Each line on stdin is a request, the arguments of `build` with ``answer`` and ``log``, two files, and ``environ``.  A
process forked from this one, which has imported vLLM, answers it; then a line on stdout says that it has ended.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from slidesparse.vllm_patch import experts
from slidesparse.vllm_patch.config import SlideSparseConfig
from slidesparse.vllm_patch.scheme import SlideSparseScheme
from torch.overrides import TorchFunctionMode
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins
from vllm.utils.torch_utils import set_default_torch_dtype

from slidesparse.checkpoint.storage import DTYPES
from slidesparse.errors import SlideSparseError

Tensors = Mapping[str, tuple[str, list[int]]]  # name -> dtype of safetensors, shape
WEIGHTS = ("weight", "compressed", "w13_weight", "w2_weight")  # of linear layers, and of experts
PARTS = ("weight", "weight_scale", "bias", "compressed", "bitmask", "shape", "row_offsets")


def build(folder: str, tensors: Tensors, options: Mapping[str, Any], plan: bool) -> dict[str, Any]:
    """Return what vLLM makes of a checkpoint: see `slidesparse.serving.Serving`.  Raises what the server would.

    Args:
        options: more arguments of ``vllm serve``.
        plan: whether the checkpoint is for another machine: attention and kernels for experts, which may not run on
            this one, are left out.
    """
    load_general_plugins()
    if plan:
        MLAAttention.__init__ = _without_attention
        for module, kernels in ((experts.of_int8, "int8"), (experts.of_fp8, "fp8")):
            setattr(module, f"select_{kernels}_moe_backend", lambda *_, **__: (None, None))
    arguments = {"skip_tokenizer_init": True, "enforce_eager": True, **options}
    config = EngineArgs(model=folder, **arguments).create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as store:
        init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"), _Ones():
            model = initialize_model(config)
        fed = _feed(model, tensors)
    ours = config.quant_config if isinstance(config.quant_config, SlideSparseConfig) else None
    return {
        "layers": [
            _layer(path, module, fed.get(path, {}))
            for path, module in model.named_modules()
            if (_is_linear(module) and hasattr(module, "weight")) or _is_ours(module)
        ],
        "left": ours.summary.dense if ours else {},
        "resolution": asdict(ours.resolution) if ours else None,
    }


class _Ones(TorchFunctionMode):
    """Gives ones to functions that read values on the device ``meta``, as some models do while they are made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        try:
            return func(*args, **(kwargs or {}))
        except (NotImplementedError, RuntimeError):
            is_meta = [isinstance(value, torch.Tensor) and value.is_meta for value in args]
            if not any(is_meta):
                raise
            ones = (
                torch.ones_like(x, device="cpu") if meta else x for x, meta in zip(args, is_meta, strict=True)
            )
            return func(*ones, **(kwargs or {}))


def _without_attention(self: torch.nn.Module, *_: Any, **__: Any) -> None:
    torch.nn.Module.__init__(self)


def _is_linear(module: torch.nn.Module) -> bool:
    """Return whether a module is a linear layer, or a quantized lm_head."""
    return isinstance(module, LinearBase) or (
        isinstance(module, ParallelLMHead) and hasattr(module, "scheme")
    )


def _is_ours(module: torch.nn.Module) -> bool:
    """Return whether a module is routed experts that our method may serve."""
    return isinstance(getattr(module, "quant_method", None), experts.Experts)


def _layer(path: str, module: Any, tensors: Mapping[str, list[str]]) -> dict[str, Any]:
    scheme = getattr(module, "scheme", None)
    quantized = not isinstance(module.quant_method, UnquantizedLinearMethod)
    method = type(scheme or module.quant_method).__name__.removeprefix("CompressedTensors")
    reason = f"vLLM's {method}" if quantized else "not quantized"
    if isinstance(scheme, SlideSparseScheme):
        reason = scheme.dense_because or ""
    if _is_ours(module):
        reason, (rows, columns) = "", module.w13_weight.shape[1:]
    else:
        rows = getattr(module, "output_size", 0) or module.num_embeddings
        columns = getattr(module, "input_size", 0) or module.embedding_dim
    return {
        "name": getattr(module, "prefix", path),
        "rows": rows,
        "columns": columns,
        "quantized": quantized,
        "reason": reason,
        "weights": [name.rpartition(".")[0] for kind in WEIGHTS for name in tensors.get(kind, [])],
    }


def _feed(model: torch.nn.Module, tensors: Tensors) -> dict[str, dict[str, list[str]]]:
    """Load all tensors; return those of each module: path -> name of its parameter -> names of tensors.

    Only linear layers run their loaders, which check shapes; those of others may read values, which there are none of.
    """
    fed: dict[str, dict[str, list[str]]] = {}
    loaders: list[tuple[Any, Any]] = []  # parameters and their loaders
    current = ""  # the tensor that load_weights has asked for last

    def watch(path: str, module: torch.nn.Module, kind: str, parameter: Any) -> None:
        loader = getattr(parameter, "weight_loader", None)

        def record(*arguments: Any, **keywords: Any) -> Any:
            names = [getattr(value, "name_in_checkpoint", "") for value in (*arguments, *keywords.values())]
            fed.setdefault(path, {}).setdefault(kind, []).append(max(names) or current)
            if loader and _is_linear(module) and kind in PARTS:
                loader(*arguments, **keywords)
            return True  # as experts' loaders do

        loaders.append((parameter, loader))
        parameter.weight_loader = record

    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            watch(path, module, kind, parameter)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, (dtype, shape) in tensors.items():
            current = name
            tensor = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            tensor.name_in_checkpoint = name  # type: ignore[attr-defined]  # for models that collect tensors first
            yield name, tensor

    try:
        model.load_weights(weights())
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__} while vLLM loaded {current}") from error
    for parameter, loader in loaders:
        if loader:
            parameter.weight_loader = loader
    for module in model.modules():
        if isinstance(scheme := getattr(module, "scheme", None), SlideSparseScheme):
            scheme.require_loaded(module)
    return fed


def _answer(answer: str, environ: Mapping[str, str], **request: Any) -> None:
    """Write what `build` returns, or an error of ours, to a file; others are in the log."""
    os.environ.clear()
    os.environ.update(environ)
    try:
        result = build(**request)
    except Exception as error:
        ours = _our_error(error)
        if ours is None:
            raise
        result = {"error": " ".join(str(ours).split()), "code": ours.exit_code}
    Path(answer).write_text(json.dumps(result), encoding="utf-8")


def _our_error(error: BaseException | None) -> SlideSparseError | None:
    """Return the error of ours that an error, such as pydantic's of a config, is or was caused by."""
    if error is None or isinstance(error, SlideSparseError):
        return error
    details = error.errors() if isinstance(error, ValidationError) else []
    causes = [detail.get("ctx", {}).get("error") for detail in details] + [error.__cause__]
    return next(filter(None, map(_our_error, causes)), None)


def main() -> None:
    """Answer requests until stdin ends."""
    told = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints must not mix with ours
    # otherwise vLLM starts a process, which imports it again, to look at each class of models
    registry._run_in_subprocess = lambda look: look()
    gc.freeze()  # so that children do not copy all objects when they collect garbage
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            with open(request.pop("log"), "wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            try:
                _answer(**request)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(child, 0)
        os.write(told, b"ended\n")


if __name__ == "__main__":
    main()
