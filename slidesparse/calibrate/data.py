"""Calibration data: texts or token ids become samples that the layers are run on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slidesparse import token_files
from slidesparse.calibrate.errors import CalibrationError, MissingPackageError
from slidesparse.calibrate.models import Model

RANDOM = "random"
SAMPLES, SEQLEN = 128, 2048
KINDS = "FILE.jsonl (a text a line), FILE.npy (token ids), or the word random"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Samples:
    """What the layers are run on."""

    ids: tuple[Tensor, ...]  # int64 [tokens] each
    origin: str  # in words
    note: str = ""  # what the user should know

    @property
    def tokens(self) -> int:
        """Over all samples."""
        return sum(len(sample) for sample in self.ids)

    @property
    def words(self) -> str:
        """Such as ``calib.jsonl, 128 samples, 262144 tokens``."""
        return f"{self.origin}, {len(self.ids)} samples, {self.tokens} tokens"

    @property
    def digest(self) -> str:
        """A hash of all ids and of where samples end."""
        found = hashlib.sha256()
        for sample in self.ids:
            found.update(f"{len(sample)}:".encode())
            found.update(sample.numpy().tobytes())
        return found.hexdigest()


def load_samples(
    calib: str, model: Model, samples: int = SAMPLES, seqlen: int | None = None, seed: int = 0
) -> Samples:
    """Read calibration data.

    Args:
        calib: a ``.jsonl`` file of texts (strings, or objects with "text"), tokenized with the checkpoint's own
            tokenizer; a ``.npy`` file of ids, [samples, tokens] or one stream [tokens]; or "random".
        samples: how many to draw; with fewer at hand all are taken, and `Samples.note` says so.
        seqlen: tokens of a sample; by default SEQLEN or what the model takes.  Decoders read texts as one stream cut
            into samples of this length, encoders each text by itself, truncated to it.
        seed: of the choice.

    Raises CalibrationError for data that do not do, MissingPackageError without a tokenizer library.
    """
    if samples < 1:
        raise CalibrationError(f"--samples {samples} is too few; at least 1 is needed, 128 are usual")
    if seqlen is not None and not 2 <= seqlen <= model.longest:
        raise CalibrationError(
            f"--seqlen {seqlen} is not from 2 to {model.longest}, which is as far as this model looks"
        )
    length = seqlen or min(SEQLEN, model.longest)
    generator = np.random.default_rng(seed)
    if calib == RANDOM:
        drawn = generator.integers(0, model.vocabulary, (samples, length))
        note = "random tokens show the layers nothing of the texts they will meet: for trying things out only"
        return Samples(tuple(torch.from_numpy(row) for row in drawn), "random tokens", note)
    path = Path(calib)
    if path.suffix not in (".jsonl", ".npy"):
        raise CalibrationError(f"--calib {calib!r} is not of a kind known; give {KINDS}")
    if not path.is_file():
        raise CalibrationError(f"--calib {calib!r} is no file; give {KINDS}")
    if path.suffix == ".npy":
        found = _from_ids(path, length)
        chosen = [found[i] for i in sorted(generator.permutation(len(found))[:samples])]
    else:
        texts = token_files.texts(path, ("text",), CalibrationError)
        shuffled = (texts[i][0] for i in generator.permutation(len(texts)))
        encode = tokenizer_of(model.checkpoint.folder)
        take = _streamed if model.is_decoder else _one_by_one
        chosen = take((encode(text) for text in shuffled), samples, length)
    if not chosen:
        raise CalibrationError(
            f"{path} gives no sample of {length} tokens; give more text, or a smaller --seqlen"
        )
    note = ""
    if len(chosen) < samples:
        note = f"{path.name} gives {len(chosen)} samples of at most {length} tokens, {samples} were asked for"
    ids = tuple(torch.from_numpy(np.ascontiguousarray(row, dtype=np.int64)) for row in chosen)
    return Samples(ids, path.name, note)


def _from_ids(path: Path, length: int) -> list[np.ndarray]:
    found = token_files.ids(path, CalibrationError)
    if found.ndim == 1:
        whole = len(found) // length * length
        return list(found[:whole].reshape(-1, length))
    return [row[:length] for row in found] if found.shape[1] > 1 else []


def tokenizer_of(folder: Path) -> Callable[[str], list[int]]:
    """Text to ids, special tokens included, with the checkpoint's own tokenizer."""
    if not (folder / TOKENIZER).is_file():
        return _slow_tokenizer(folder)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingPackageError(
            f"texts need a tokenizer, but the package tokenizers cannot be imported ({error}); pip install "
            "tokenizers, or give token ids instead of texts: ids.npy"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the library raises plain Exception
        raise CalibrationError(
            f"{folder / TOKENIZER} is not a tokenizer that the package tokenizers reads ({error}); fetch it again, "
            "or give token ids instead of texts: ids.npy"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda text: list(tokenizer.encode(text).ids)


def _slow_tokenizer(folder: Path) -> Callable[[str], list[int]]:
    """For checkpoints that carry another form of tokenizer, such as tokenizer.model."""
    if not any(path.is_file() for kind in ("tokenizer*", "vocab*") for path in folder.glob(kind)):
        raise CalibrationError(
            f"{folder} has no tokenizer ({TOKENIZER}), which texts need; fetch it, or give token ids instead of "
            "texts: ids.npy"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingPackageError(
            f"{folder} has no {TOKENIZER}, and its other tokenizer needs the package transformers, which cannot be "
            f"imported ({error}); pip install transformers, or give token ids instead of texts: ids.npy"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise CalibrationError(
            f"the tokenizer of {folder} cannot be read: {error}; give token ids instead of texts: ids.npy"
        ) from error
    return lambda text: list(tokenizer(text)["input_ids"])


def _streamed(encoded: Iterator[list[int]], samples: int, length: int) -> list[np.ndarray]:
    """Documents one after the other, cut into samples; no more are read than needed."""
    stream: list[int] = []
    for ids in encoded:
        stream += ids
        if len(stream) >= samples * length:
            break
    count = min(samples, len(stream) // length)
    return list(np.asarray(stream[: count * length], dtype=np.int64).reshape(count, length))


def _one_by_one(encoded: Iterator[list[int]], samples: int, length: int) -> list[np.ndarray]:
    """A text a sample."""
    return [
        np.asarray(token_files.clipped(ids, length), dtype=np.int64)
        for ids in islice((ids for ids in encoded if ids), samples)
    ]
