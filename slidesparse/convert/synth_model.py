"""The model that ``slidesparse synth`` writes: its config, its tensors and a placeholder tokenizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slidesparse.checkpoint.architectures import WEIGHT, architecture_of, size_of
from slidesparse.checkpoint.bitnet import is_bitnet
from slidesparse.checkpoint.storage import CONFIG, CheckpointError, TensorSpec, parse_json

Config = Mapping[str, Any]

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # torch_dtype -> safetensors
KNOWN = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    "BitNetForCausalLM",
)
_QKV = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")

_QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "vocab_size": 152064,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
}
_LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


_BITNET = {
    "architectures": ["BitNetForCausalLM"],
    "model_type": "bitnet",
    "hidden_act": "relu2",
    "attention_bias": False,
    "initializer_range": 0.02,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def _sizes(hidden: int, intermediate: int, heads: int, kv_heads: int, layers: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
    }


# The architectures of base models, as their config.json on Hugging Face gives them
PUBLIC: Mapping[str, Config] = {
    "Llama3.2-1B": {**_LLAMA32, **_sizes(2048, 8192, 32, 8, 16), "head_dim": 64},
    "Llama3.2-3B": {**_LLAMA32, **_sizes(3072, 8192, 24, 8, 28), "head_dim": 128},
    "Qwen2.5-7B": {**_QWEN25, **_sizes(3584, 18944, 28, 4, 28), "rms_norm_eps": 1e-6},
    "Qwen2.5-14B": {**_QWEN25, **_sizes(5120, 13824, 40, 8, 48), "rms_norm_eps": 1e-5},
    "BitNet-2B": {**_BITNET, **_sizes(2560, 6912, 20, 5, 30)},
}
TOKENIZER = "tokenizer"  # the folder of `tokenizer_files` in a checkpoint


def read_config(config: str | Path) -> dict[str, Any]:
    """Read a config.json, or the one of a folder, or one of PUBLIC by name.

    Raises CheckpointError when there is none.
    """
    name = str(config)
    if name in PUBLIC:
        return copy.deepcopy(dict(PUBLIC[name]))
    path = Path(config)
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        raise CheckpointError(
            f"{name!r} is neither one of {', '.join(PUBLIC)}, nor a {CONFIG}, nor a folder that holds one"
        )
    return parse_json(path.read_bytes(), path)


def first_layers(config: Config, count: int) -> dict[str, Any]:
    """Return the config of the model's first ``count`` layers.  Raises CheckpointError for an invalid count."""
    total = size_of(config, "num_hidden_layers")
    if not 1 <= count <= total:
        raise CheckpointError(f"--layers {count} must be from 1 to {total}, the layers of the model")
    cut = {**config, "num_hidden_layers": count}
    if isinstance(config.get("layer_types"), list):  # one entry a layer
        cut["layer_types"] = config["layer_types"][:count]
    return cut


def tensors(config: Config) -> list[TensorSpec]:
    """Return names, dtypes and shapes of the float checkpoint's tensors, in the order of the model.

    Raises CheckpointError for a model that is not in KNOWN, and for a config that lacks a size.
    """
    architecture = architecture_of(config)
    if architecture not in KNOWN:
        raise CheckpointError(
            f"config.json names the architecture {architecture!r}; random weights can be made for "
            f"{', '.join(KNOWN)}: take the config of such a model of the same sizes"
        )
    if not config.get("model_type"):
        raise CheckpointError("config.json has no model_type, by which vLLM finds the model; fetch it again")
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if dtype not in DTYPES:
        raise CheckpointError(f"config.json: torch_dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    hidden, vocabulary = size_of(config, "hidden_size"), size_of(config, "vocab_size")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    block = dict(_block(config, architecture))
    for layer in range(size_of(config, "num_hidden_layers")):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return [TensorSpec(name, DTYPES[dtype], shape) for name, shape in shapes.items()]


def _block(config: Config, architecture: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes in one layer of the decoder."""
    hidden, intermediate = size_of(config, "hidden_size"), size_of(config, "intermediate_size")
    heads = size_of(config, "num_attention_heads")
    kv_heads = size_of(config, "num_key_value_heads", heads)
    head = size_of(config, "head_dim", hidden // heads)
    shapes = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv_heads * head, hidden),
        "self_attn.v_proj": (kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    biased = _biased(config, architecture)
    yield "input_layernorm.weight", (hidden,)
    for name, shape in shapes.items():
        yield name + WEIGHT, shape
        if name.rpartition(".")[2] in biased:
            yield f"{name}.bias", shape[:1]
    if architecture == "Qwen3ForCausalLM":
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)
    if is_bitnet(config):
        yield "self_attn.attn_sub_norm.weight", (heads * head,)
        yield "mlp.ffn_sub_norm.weight", (intermediate,)
    yield "post_attention_layernorm.weight", (hidden,)


def _biased(config: Config, architecture: str) -> tuple[str, ...]:
    """Return the projections that have a bias, as vLLM builds them."""
    if architecture == "Qwen2ForCausalLM":
        return _QKV
    attention = bool(config.get("attention_bias"))
    if architecture == "Qwen3ForCausalLM":
        return _QKV if attention else ()
    return ((*_QKV, "o_proj") if attention else ()) + (_MLP if config.get("mlp_bias") else ())


def tokenizer_files(config: Config) -> dict[str, bytes]:
    """Return the files of a tokenizer with one word per token, "t0" to "t151935": file -> content.

    It replaces the real one, so that prompts keep their lengths when vLLM's commands tokenize them.  It needs a folder
    of its own: next to the model's config.json, transformers would use that model's tokenizer class, and some of these
    cannot read such words.  vLLM also looks for a config.json there, and retries for some seconds; a GPT-2 config
    accepts any tokenizer.json.
    """
    vocabulary = {f"t{token}": token for token in range(size_of(config, "vocab_size"))}
    splitter = {"type": "WhitespaceSplit"}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": splitter, "model": model}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "pad_token": "t0"}
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "config.json": {"model_type": "gpt2"},
    }
    return {name: json.dumps(content).encode() for name, content in files.items()}
