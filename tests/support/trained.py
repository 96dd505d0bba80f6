"""A small language model of bytes, trained in seconds on a GPU with the sources of Python and torch as its text.

Comparison of top-1 tokens needs a trained model: logits of random weights differ by little more than rounding errors,
so that their order proves nothing.

``python trained.py OUT`` trains, writes a BF16 checkpoint and ``held_out.npy``, text that the model has not seen, and
prints the `Outcome` as JSON.
"""

from __future__ import annotations

import json
import math
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

DEVICE = "cuda"
VOCABULARY = 320  # 256 bytes, and a few that never occur
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,  # no multiple of 6, 10 or 12: rows end in a part of a block
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}
LAYERS = 4 * SHAPE["num_hidden_layers"]  # as vLLM counts them: qkv_proj, o_proj, gate_up_proj, down_proj
STEPS, BATCH, WINDOW = 1500, 64, 256
LEARNING_RATE, WARM_UP = 2e-3, 100
# The weight of logsumexp(logits)^2 in the loss.  It keeps logits near log-probabilities, the likely ones near 0, where
# BF16 tells them apart; logits of 10 come in steps of 1/16, and one position in a hundred has two best tokens.
LOGSUMEXP = 0.01
TRAINING_BYTES, HELD_OUT_BYTES = 48 << 20, 1 << 20
ONE_FILE_IN = 20  # files is held out
HELD_OUT = "held_out.npy"
NOT_TEXT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Outcome:
    """The result of training, in bits per byte of held-out text."""

    bits: float
    unigram_bits: float  # of a model that knows only the frequency of each byte
    seconds: float


def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Return training bytes [T] and held-out bytes of other files, the same on every run with the same packages."""
    folders = (Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent)
    training, held_out = bytearray(), bytearray()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder)
            if NOT_TEXT & set(name.parts):
                continue
            target = held_out if crc32(str(name).encode()) % ONE_FILE_IN == 0 else training
            if len(target) < (HELD_OUT_BYTES if target is held_out else TRAINING_BYTES):
                target += path.read_bytes() + b"\0"
    return np.frombuffer(training, np.uint8), np.frombuffer(held_out, np.uint8)


def train(out: Path) -> Outcome:
    """Train, and write the checkpoint and the held-out text into ``out``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    started = time.monotonic()
    torch.manual_seed(0)
    training, held_out = corpus()
    data = torch.from_numpy(training.copy()).to(DEVICE)
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 256, "eos_token_id": 257}
    config = LlamaConfig(rms_norm_eps=1e-6, tie_word_embeddings=False, **ids, **SHAPE)
    model = LlamaForCausalLM(config).to(DEVICE)
    adam = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.98), weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, _rate)
    generator = torch.Generator(DEVICE).manual_seed(0)
    offsets = torch.arange(WINDOW, device=DEVICE)
    for _ in range(STEPS):
        starts = torch.randint(len(data) - WINDOW, (BATCH, 1), generator=generator, device=DEVICE)
        windows = data[starts + offsets].long()
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = _logits(model, windows)
        loss = _loss(logits, windows) + LOGSUMEXP * logits.logsumexp(-1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
        adam.zero_grad()
    outcome = Outcome(_bits(model, held_out), _unigram_bits(held_out), time.monotonic() - started)
    model.to(torch.bfloat16).save_pretrained(out)
    np.save(out / HELD_OUT, held_out)
    return outcome


def _rate(step: int) -> float:
    warm = min(1.0, (step + 1) / WARM_UP)
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))


def _logits(model: object, windows: Tensor) -> Tensor:
    """windows [B, T] -> float32 logits of each byte but the first, [B, T - 1, V]."""
    logits: Tensor = model(input_ids=windows).logits  # type: ignore[operator]
    return logits[:, :-1].float()


def _loss(logits: Tensor, windows: Tensor) -> Tensor:
    """Mean cross entropy in nats."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def windows_of(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """Return [count, length] bytes from positions spread evenly over ``text``."""
    starts = np.linspace(0, len(text) - length, count).astype(int)
    return np.stack([text[start : start + length] for start in starts])


@torch.no_grad()
def _bits(model: object, held_out: np.ndarray) -> float:
    windows = torch.from_numpy(windows_of(held_out, 64, WINDOW)).long().to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        return _loss(_logits(model, windows), windows).item() / math.log(2)


def _unigram_bits(text: np.ndarray) -> float:
    shares = np.bincount(text, minlength=256) / len(text)
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


if __name__ == "__main__":
    print(json.dumps(asdict(train(Path(sys.argv[1])))))
