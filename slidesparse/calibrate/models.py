"""The models whose layers `slidesparse.calibrate.forward` can run, read from config.json and safetensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from slidesparse.architectures import architecture_of
from slidesparse.calibrate.errors import CalibrationError
from slidesparse.calibrate.forward import ACTIVATIONS, Block, DecoderBlock, EncoderBlock, Shape
from slidesparse.checkpoint import DTYPES, Checkpoint, Reader

Config = Mapping[str, Any]

DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")
ENCODERS = ("Bert", "Roberta", "XLMRoberta")
_HEADS = ("ForCausalLM", "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Model:
    """A checkpoint seen as embeddings and a row of like layers."""

    checkpoint: Checkpoint
    kind: str  # one of DECODERS or ENCODERS
    root: str  # before "layers.0." or "encoder.layer.0."
    shape: Shape
    blocks: int
    hidden: int
    vocabulary: int
    longest: int  # tokens of a sequence, at most

    @property
    def is_decoder(self) -> bool:
        """Whether tokens see only those before them."""
        return self.kind in DECODERS

    def prefix(self, number: int) -> str:
        """What the names of the tensors of a layer start with."""
        return f"{self.root}{'layers' if self.is_decoder else 'encoder.layer'}.{number}."

    def load(self, reader: Reader, number: int, device: torch.device) -> Block:
        """A layer, its tensors in float32 on ``device``."""
        prefix = self.prefix(number)
        names = [name for name in self.checkpoint.tensors if name.startswith(prefix)]
        weights = {name.removeprefix(prefix): reader.whole(name).to(device).float() for name in names}
        kind = DecoderBlock if self.is_decoder else EncoderBlock
        for layer in (name for stage in kind.stages for name in stage):
            self.checkpoint.require(f"{prefix}{layer}.weight")
        return kind(self.shape, weights)

    def embedder(
        self, reader: Reader, samples: Sequence[Tensor], device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """A function from ids [batch, tokens] of ``samples`` to what the first layer reads, float32."""
        name = f"{self.root}{'embed_tokens' if self.is_decoder else 'embeddings.word_embeddings'}.weight"
        used = torch.cat([sample.reshape(-1) for sample in samples]).unique()
        table = _rows(self.checkpoint, reader, name, used).to(device)
        words = used.to(device)

        def embed(ids: Tensor) -> Tensor:
            return F.embedding(torch.searchsorted(words, ids.to(device)), table).float()

        return embed if self.is_decoder else self._with_positions(reader, embed, device)

    def _with_positions(
        self, reader: Reader, words: Callable[[Tensor], Tensor], device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """An encoder adds positions and the first token type, and normalizes."""

        def tensor(name: str) -> Tensor:
            found = f"{self.root}embeddings.{name}"
            self.checkpoint.require(found)
            return reader.whole(found).to(device).float()

        positions, types = tensor("position_embeddings.weight"), tensor("token_type_embeddings.weight")
        weight, bias = tensor("LayerNorm.weight"), tensor("LayerNorm.bias")
        first = _first_position(self.checkpoint.config, self.kind)

        def embed(ids: Tensor) -> Tensor:
            x = words(ids) + types[0] + positions[first : first + ids.shape[1]]
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.shape.eps)

        return embed


def _first_position(config: Config, kind: str) -> int:
    """RoBERTa counts positions from behind that of padding."""
    return 0 if kind == "Bert" else int(config.get("pad_token_id") or 0) + 1


def _rows(checkpoint: Checkpoint, reader: Reader, name: str, wanted: Tensor) -> Tensor:
    """The rows ``wanted`` (sorted) of an embedding, read a chunk at a time."""
    spec = checkpoint.require(name)
    if len(wanted) and not 0 <= int(wanted[0]) <= int(wanted[-1]) < spec.rows:
        raise CalibrationError(
            f"the calibration ids run from {int(wanted[0])} to {int(wanted[-1])}, but {name} has {spec.rows} rows; "
            "they were made with another tokenizer"
        )
    table = torch.empty(len(wanted), spec.columns, dtype=DTYPES[spec.dtype])
    for rows in spec.chunks():
        first, last = torch.searchsorted(wanted, torch.tensor([rows.start, rows.stop])).tolist()
        if first < last:
            table[first:last] = reader.rows(name, rows)[wanted[first:last] - rows.start]
    return table


def open_model(checkpoint: Checkpoint) -> Model:
    """The model of a checkpoint.  Raises CalibrationError for what cannot be run here, and says what can."""
    config = checkpoint.config
    kind = _kind(config)
    heads, hidden = _number(config, "num_attention_heads"), _number(config, "hidden_size")
    head_dim = config.get("head_dim") or hidden // heads
    blocks, longest = _number(config, "num_hidden_layers"), _number(config, "max_position_embeddings")
    vocabulary = _number(config, "vocab_size")
    if kind in DECODERS:
        root = "model." if "model.embed_tokens.weight" in checkpoint.tensors else ""
        window = _window(config)
        longest = min(longest, window) if window else longest
        shape = Shape(
            heads,
            config.get("num_key_value_heads") or heads,
            head_dim,
            float(config.get("rms_norm_eps") or 1e-6),
            _activation(config),
            _frequencies(config, head_dim),
        )
    else:
        roots = ("", "bert.", "roberta.")
        root = next((r for r in roots if f"{r}embeddings.word_embeddings.weight" in checkpoint.tensors), "")
        longest -= _first_position(config, kind)
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise _not_run(f"position embeddings of type {config['position_embedding_type']!r}", "absolute")
        shape = Shape(heads, heads, head_dim, float(config.get("layer_norm_eps", 1e-12)), _activation(config))
    return Model(checkpoint, kind, root, shape, blocks, hidden, vocabulary, longest)


def _kind(config: Config) -> str:
    named = architecture_of(config) or ""
    for head in _HEADS:
        if named.endswith(head) and named.removesuffix(head) in (*DECODERS, *ENCODERS):
            return named.removesuffix(head)
    raise CalibrationError(
        f"calibration runs the layers of {', '.join((*DECODERS, *ENCODERS))} models, config.json names the "
        f"architecture {named!r}; without --calib, --method magnitude takes it"
    )


def _not_run(found: str, allowed: str) -> CalibrationError:
    return CalibrationError(
        f"config.json asks for {found}, which calibration cannot run (it can: {allowed}); "
        "without --calib, --method magnitude takes the model"
    )


def _number(config: Config, key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CalibrationError(
            f"config.json: {key} is {value!r}; it must be a whole number of at least 1: fetch the config again"
        )
    return value


def _activation(config: Config) -> Callable[[Tensor], Tensor]:
    named = config.get("hidden_act", "silu")
    if named not in ACTIVATIONS:
        raise _not_run(f"the activation {named!r}", ", ".join(ACTIVATIONS))
    return ACTIVATIONS[named]


def _window(config: Config) -> int | None:
    """Tokens that a layer looks back at most; what is longer would need another mask."""
    window = config.get("sliding_window")
    return window if isinstance(window, int) and config.get("use_sliding_window", True) else None


def _frequencies(config: Config, head_dim: int) -> Tensor:
    """Rotary frequencies, scaled as config.json says (its rope_parameters, or rope_theta and rope_scaling)."""
    scaling: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPES or float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise _not_run(f"rotary embeddings of type {kind!r}, or partial ones", ", ".join(ROPES))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / theta**exponents
    try:
        if kind == "linear":
            return frequencies / float(scaling["factor"])
        return _llama3(frequencies, scaling) if kind == "llama3" else frequencies
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CalibrationError(
            f"config.json: rotary embeddings of type {kind!r} lack a usable {error}: fetch the config again"
        ) from error


def _llama3(frequencies: Tensor, scaling: Config) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched, short ones kept, those between interpolated."""
    factor, low, high = (float(scaling[f"{n}factor"]) for n in ("", "low_freq_", "high_freq_"))
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, between)
    return torch.where(wavelengths < original / high, frequencies, scaled)
