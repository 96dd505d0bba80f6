"""Load damaged checkpoints into vLLM with the plugin, each in a forked process.

No engine is started: the model is made and loaded as a worker does, and each of its linear layers multiplies some
activations.  The products must be those of the weights that `convert` reads from the same files.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from pathlib import Path
from typing import Any

import fuzz
import torch
from engines import Request, llm_options, text_of

from slidesparse.checkpoint.metadata import Metadata
from slidesparse.errors import SlideSparseError
from slidesparse.slide import unslide

OURS = ("slidesparse/", "vllm_patch/")
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def load(folder: Path) -> Any:
    """Load a checkpoint as vLLM's model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(model=str(folder), **llm_options(Request(""))).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config)


def products(model: Any) -> dict[str, tuple[torch.Tensor, bool]]:
    """Map the name of each layer to its output [N] for `activations`, and whether it has a bias."""
    layers = ((name, module) for name, module in model.named_modules() if getattr(module, "scheme", None))
    outputs = {}
    for name, layer in layers:
        y = layer(activations(layer.input_size))
        outputs[name] = (y[0] if isinstance(y, tuple) else y)[0], layer.bias is not None
    return outputs


def activations(in_features: int) -> torch.Tensor:
    return torch.randn(1, in_features, generator=torch.Generator().manual_seed(in_features))


def require_right(folder: Path, outputs: dict[str, tuple[torch.Tensor, bool]]) -> None:
    """Raise Defect unless outputs equal the stored weights' products, up to the quantization error of activations.

    Those of other tools' formats are the products of the original weights.
    """
    try:
        tensors = fuzz.stored(folder)
    except SlideSparseError:  # for example an index that vLLM reads less strictly
        tensors = fuzz.tensors_of(folder)
    metadata = Metadata.of_config(fuzz.config_of(folder).get("quantization_config"))
    if metadata is None:
        tensors = fuzz.weights() | {f"{name}.weight_scale": torch.ones(1) for name in fuzz.TINY.linears()}
    for name, (y, biased) in outputs.items():
        head, _, last = name.rpartition(".")
        parts, norms = [], []
        for part in (f"{head}.{part}" for part in FUSED.get(last, [last])):
            weight, entry = tensors[f"{part}.weight"], (metadata.layers if metadata else {}).get(part)
            if entry and metadata and metadata.layout == "slided":
                weight = unslide(weight, entry.pattern, entry.in_features)
            weight = weight.double() * tensors[f"{part}.weight_scale"].double().reshape(-1, 1)
            x = activations(weight.shape[1])[0].double()
            bias = tensors[f"{part}.bias"].double() if biased else 0
            parts.append(weight @ x + bias)
            norms.append(weight.norm(dim=1) * x.norm())
        expected, allowed = torch.cat(parts), 0.02 * torch.cat(norms) + 1e-2 * torch.cat(parts).abs() + 1e-6
        same = (y.double() - expected).abs() <= allowed
        same |= (y == expected.float()) | (y.isnan() & expected.isnan())
        if y.shape != expected.shape or not bool(same.all()):
            row = int((~same).nonzero()[0])
            raise fuzz.Defect(f"{name}: row {row} gives {float(y[row])}, should be {float(expected[row])}")


def serve_here(folder: Path, damage: str, outcomes: dict[str, str]) -> str:
    """Return the outcome of loading: "right", "refused" by the plugin, or the class of an error of vLLM's own."""
    if damage.startswith(fuzz.FOREIGN) or ", exchange: " in damage:
        # without metadata, a flag asks for the plugin
        os.environ |= {"USE_CUSPARSELT": "1", "SPARSITY": "6:8"}
    try:
        with fuzz.limits():
            outputs = products(load(folder))
    except fuzz.Defect:
        raise
    except BaseException as error:
        return _refused(error, damage)
    if outcomes["convert"] != "ok" and any(name.endswith(".bitmask") for name in fuzz.tensors_of(folder)):
        return "served, not judged"  # only convert, which refuses it, could read the packed form
    if damage.startswith(fuzz.FOREIGN) and not fuzz.keeps_weights(damage):
        return "served, not judged"  # the products to compare with are those of the original weights
    require_right(folder, outputs)
    return "right" if outcomes["convert"] == "ok" else "right, though convert refuses it"


def _refused(error: BaseException, damage: str) -> str:
    chain: list[BaseException] = [error]
    while (above := chain[-1].__cause__ or chain[-1].__context__) is not None and above not in chain:
        chain.append(above)
    if any(isinstance(link, SlideSparseError) for link in chain) or "Value error, " in str(error):
        return "refused"
    frames = traceback.extract_tb(error.__traceback__)
    # a RecursionError comes from whichever package reads config.json
    damaged_metadata = ", metadata: " in damage and not isinstance(error, RecursionError)
    if not frames or damaged_metadata or any(part in frames[-1].filename for part in OURS):
        raise fuzz.Defect("".join(traceback.format_exception(error))[-2500:])
    return f"vLLM's {type(error).__name__}: {frames[-1].filename}:{frames[-1].lineno} {str(error)[:300]}"


def serve(folder: Path, damage: str, outcomes: dict[str, str]) -> str:
    """Run `serve_here` in its own process, except for float models, which vLLM serves without us, and for folders
    with pipes, for which vLLM and safetensors wait.
    """
    if damage.startswith(fuzz.FLOAT) or any(path.is_fifo() for path in folder.iterdir()):
        return "not asked"
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        try:
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            try:
                outcome = serve_here(folder, damage, outcomes)
            except BaseException as error:
                outcome = f"!{error}"
            os.write(writable, outcome.encode(errors="replace")[:60_000])
        finally:
            os._exit(0)
    os.close(writable)
    text = text_of(readable, 2 * fuzz.SECONDS)
    if text is None:
        os.kill(pid, signal.SIGKILL)
    os.close(readable)
    os.waitpid(pid, 0)
    if not text or text[0] == "!":
        raise fuzz.Defect((text or "!the process ended without output, or did not end")[1:])
    return text.partition(": ")[0]


def run(first: int, count: int) -> dict[str, Any]:
    """Return ``defects``, each with its case, and ``counts`` of outcomes."""
    with tempfile.TemporaryDirectory() as name:  # imports all that loading needs
        for source in fuzz.make_sources(Path(name)):
            if source.name.startswith("dense"):
                require_right(source, products(load(source)))
    counts, defects = fuzz.run(first, count, serve)
    return {"defects": defects, "counts": dict(counts)}
