"""Calibration samples: sequences of token ids, from texts or files of ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slidesparse.calibrate.models import LayeredModel
from slidesparse.checkpoint.tokens import clipped, read_ids, read_records, require_ids, tokenizer_of
from slidesparse.errors import CalibrationError

RANDOM = "random"
SAMPLES, SEQLEN = 128, 2048
VALIDATION_INTERVAL = 8  # one in this many samples is in the validation split
MAX_TOKENS = 2**26  # where all of a text is read; half a GiB
MAX_RANDOM_TOKENS = 2**28  # tokens, 2 GiB
ACCEPTED_DATA = "FILE.jsonl (one text per line), FILE.npy (token ids), or the word random"


@dataclass(frozen=True)
class Samples:
    """Calibration samples."""

    ids: tuple[Tensor, ...]  # int64 [tokens] each
    origin: str  # the file's name, or "random tokens"
    note: str = ""  # a hint for the user

    @property
    def tokens(self) -> int:
        """The total number of tokens."""
        return sum(len(sample) for sample in self.ids)

    @property
    def summary(self) -> str:
        """A summary, such as ``calib.jsonl, 128 samples, 262144 tokens``."""
        return f"{self.origin}, {len(self.ids)} samples, {self.tokens} tokens"

    def split(self, max_validation: int | None = None) -> tuple[Samples, Samples]:
        """Split off a validation set: every VALIDATION_INTERVAL-th sample, but no more than ``max_validation``.

        Returns the training and the validation samples.  Raises CalibrationError if there is only one sample.
        """
        count = len(self.ids)
        if count < 2:
            raise CalibrationError(
                f"{self.origin} gives one sample, but two are needed, one of them to validate the pruned model; "
                "give more text, or a smaller --seqlen"
            )
        interval = max(VALIDATION_INTERVAL, -(-count // (max_validation or count)))
        first = min(interval, count) - 1
        validation = self.ids[first::interval]
        training = tuple(x for i, x in enumerate(self.ids) if i % interval != first)
        return replace(self, ids=training), replace(self, ids=validation)

    @property
    def digest(self) -> str:
        """A hash of all samples."""
        sha256 = hashlib.sha256()
        for sample in self.ids:
            sha256.update(f"{len(sample)}:".encode())
            sha256.update(sample.numpy().tobytes())
        return sha256.hexdigest()


def load_samples(
    data: str,
    model: LayeredModel,
    samples: int | None = SAMPLES,
    seqlen: int | None = None,
    seed: int = 0,
    option: str = "--calib",
) -> Samples:
    """Read calibration data.

    Args:
        data: a ``.jsonl`` file of texts (strings, or objects with "text"), tokenized by the checkpoint's tokenizer; a
            ``.npy`` file of ids, [samples, tokens] or one stream [tokens]; or "random".
        samples: number of samples; if there are fewer, all are taken and `Samples.note` says so.  None takes all, up
            to MAX_TOKENS.
        seqlen: sequence length in tokens, by default SEQLEN or the model's maximum.  For decoders, texts are joined
            and cut into samples of this length; for encoders, each text is truncated to it.
        seed: seed of the random selection.
        option: name of the data in error messages.

    Raises SlideSparseError for unusable data, EnvironmentFault without a tokenizer library.
    """
    _require_valid(samples, seqlen, seed, model)
    length = seqlen or min(SEQLEN, model.longest)
    takes_all, samples = samples is None, samples or max(1, MAX_TOKENS // length)
    generator = np.random.default_rng(seed)
    if data == RANDOM:
        return _random_samples(generator, model, samples, length)
    path = Path(data)
    if path.suffix not in (".jsonl", ".npy"):
        raise CalibrationError(f"{option} {data!r} is not a supported type of file; give {ACCEPTED_DATA}")
    if not path.is_file():
        raise CalibrationError(f"{option} {data!r} is not a file; give {ACCEPTED_DATA}")
    if path.suffix == ".npy":
        sequences = _read_sample_ids(path, length)
        chosen = [sequences[i] for i in sorted(generator.permutation(len(sequences))[:samples])]
    else:
        texts = read_records(path, ("text",))
        shuffled = (texts[i][0] for i in generator.permutation(len(texts)))
        encode = tokenizer_of(model.checkpoint.folder)
        take = _cut_stream if model.is_decoder else _sample_each_text
        chosen = take((encode(text) for text in shuffled), samples, length)
    if not chosen:
        raise CalibrationError(
            f"{path} gives no sample of {length} tokens; give more text, or a smaller --seqlen"
        )
    require_ids(chosen, model.vocabulary, f"{option} {data}", model.checkpoint.folder)
    note = ""
    if len(chosen) < samples and not takes_all:
        note = f"{path.name} gives {len(chosen)} samples of at most {length} tokens, {samples} were requested"
    ids = tuple(torch.from_numpy(np.ascontiguousarray(row, dtype=np.int64)) for row in chosen)
    return Samples(ids, path.name, note)


def _require_valid(samples: int | None, seqlen: int | None, seed: int, model: LayeredModel) -> None:
    """Raise CalibrationError for a number that is out of range."""
    if samples is not None and samples < 1:
        raise CalibrationError(
            f"--samples {samples} is too few; it must be at least 1, and the default is 128"
        )
    if seed < 0:
        raise CalibrationError(f"--seed {seed} is negative; use 0 or more")
    if seqlen is not None and not 2 <= seqlen <= model.longest:
        raise CalibrationError(
            f"--seqlen {seqlen} must be from 2 to {model.longest}, the maximum sequence length of this model"
        )


def _random_samples(
    generator: np.random.Generator, model: LayeredModel, samples: int, length: int
) -> Samples:
    """Return samples of random tokens, for trials."""
    if samples * length > MAX_RANDOM_TOKENS:
        raise CalibrationError(
            f"--samples {samples} of {length} random tokens are more than the limit of {MAX_RANDOM_TOKENS} tokens; "
            f"{SAMPLES} samples are usual"
        )
    drawn = generator.integers(0, model.vocabulary, (samples, length))
    note = (
        "random tokens do not represent the text that the model will serve; use them only to try things out"
    )
    return Samples(tuple(torch.from_numpy(row) for row in drawn), "random tokens", note)


def _read_sample_ids(path: Path, length: int) -> list[np.ndarray]:
    """Return the samples of a ``.npy`` file: its rows truncated to ``length``, or its stream cut into samples."""
    ids = read_ids(path)
    if ids.ndim == 1:
        usable = len(ids) // length * length
        return list(ids[:usable].reshape(-1, length))
    return [row[:length] for row in ids] if ids.shape[1] > 1 else []


def _cut_stream(encoded: Iterator[list[int]], samples: int, length: int) -> list[np.ndarray]:
    """Join documents and cut them into samples, reading no more than needed."""
    parts: list[np.ndarray] = []
    tokens = 0
    for ids in encoded:
        parts.append(np.asarray(ids, dtype=np.int64))
        tokens += len(ids)
        if tokens >= samples * length:
            break
    count = min(samples, tokens // length)
    return list(np.concatenate(parts)[: count * length].reshape(count, length))


def _sample_each_text(encoded: Iterator[list[int]], samples: int, length: int) -> list[np.ndarray]:
    """Make a sample of each text that has at least one token."""
    return [
        np.asarray(clipped(ids, length), dtype=np.int64)
        for ids in islice((ids for ids in encoded if ids), samples)
    ]
