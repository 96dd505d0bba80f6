"""Calibration samples: sequences of token ids, from texts, conversations, files of ids, or the model itself."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

from slidesparse.calibrate.model import Model
from slidesparse.calibrate.written import DISTILLATION_TOKENS, SELF, write
from slidesparse.checkpoint import tokens
from slidesparse.checkpoint.tokens import Document
from slidesparse.errors import FORMS, CalibrationError, SlideSparseError
from slidesparse.progress import Progress

RANDOM = "random"
REFERENCE = (
    "pydoc_data.topics"  # the reference of the Python language: English prose and code that every Python has
)
SAMPLES, SEQLEN = 128, 2048
VALIDATION_INTERVAL = 8  # one in this many samples is in the validation split
MAX_TOKENS = 2**26  # where all of a text is read; half a GiB
PIECE = 2**14  # least characters of a piece of a text, cut at the next end of a line or at twice as many
SEED = 0


@dataclass(frozen=True)
class Samples:
    """Calibration samples."""

    ids: tuple[Tensor, ...]  # int64 [tokens] each
    origin: str  # the names of files, or what else it is, such as "random tokens"
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


def load_sources(
    data: Sequence[str],
    model: Model,
    progress: Progress,
    samples: int | None = SAMPLES,
    seqlen: int | None = None,
    option: str = "--calib",
) -> list[Samples]:
    """Read calibration data; return the samples of each source.

    Args:
        data: files in the FORMS of `slidesparse.errors`, tokenized by the checkpoint's tokenizer, datasets
            on the Hub, "self" for text that the model writes (see `slidesparse.calibrate.written`), REFERENCE, or
            "random"; none of them twice.  Each contributes an equal share of the samples, or all that it has.
        progress: called while texts are tokenized and while the model writes.
        samples: number of samples; if a source has fewer, all are taken and `Samples.note` says so.  None takes all, up
            to MAX_TOKENS of all sources together, where `Samples.note` says so, and of the model's own text
            DISTILLATION_TOKENS.
        seqlen: sequence length in tokens, by default SEQLEN or the model's maximum.  For causal models, texts are
            joined and cut into samples of this length; for others, each text is truncated to it.
        option: name of the data in error messages.

    Raises SlideSparseError for unusable data, EnvironmentFault without a tokenizer library.
    """
    if seqlen is not None and not 2 <= seqlen <= model.longest:
        raise CalibrationError(
            f"--seqlen {seqlen} must be from 2 to {model.longest}, the maximum sequence length of this model"
        )
    if repeated := next((source for source in data if data.count(source) > 1), ""):
        raise CalibrationError(f"{option} {repeated} is given twice; name each source once")
    length = seqlen or min(SEQLEN, model.longest)
    most = max(1, MAX_TOKENS // length)
    if samples is not None and not len(data) <= samples <= most:
        raise CalibrationError(
            f"--samples {samples} must be from {len(data)}, one for each {option}, to {most} of {length} tokens"
        )
    left, found = samples or most, dict[str, Samples]()
    # Smaller sources first: what they lack of their share is left to larger ones
    for source in data if samples else sorted(data, key=_size):
        share = -(-left // (len(data) - len(found)))
        if source == SELF:
            few = share if samples else max(2, DISTILLATION_TOKENS[model.device.type] // length)
            ids, note = write(model, min(share, few), length, progress, option)
            part = Samples(_tensors(ids), "its own text", note)
        else:
            part = _load(source, model, share, length, option, progress)
            if samples and len(part.ids) < share:
                lack = f"{len(part.ids)} samples of at most {length} tokens, {share} were requested"
                part = _noted(part, f"{part.origin} gives {lack}")
            elif not samples and len(part.ids) == share and source != RANDOM:
                used = f"{part.tokens} tokens are used: all sources together give {most * length} at most"
                part = _noted(part, f"of {part.origin}, {used}")
        found[source] = part
        left -= share if samples else len(part.ids)
    return [found[source] for source in data]


def _size(source: str) -> float:
    """Return the bytes of a file, those of what is no file as infinite, but for the model's own text."""
    path = Path(source)
    return 0 if source == SELF else path.stat().st_size if path.is_file() else math.inf


def join(sources: Sequence[Samples]) -> Samples:
    """Return the samples of all sources."""
    ids = tuple(sample for source in sources for sample in source.ids)
    notes = dict.fromkeys(source.note for source in sources if source.note)
    return Samples(ids, " and ".join(source.origin for source in sources), "; ".join(notes))


def _noted(samples: Samples, note: str) -> Samples:
    return replace(samples, note="; ".join(filter(None, [samples.note, note])))


def _tensors(rows: Iterable[np.ndarray]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(row, dtype=np.int64)) for row in rows)


def _load(data: str, model: Model, samples: int, length: int, option: str, progress: Progress) -> Samples:
    """Read at most ``samples`` samples of one source."""
    generator = np.random.default_rng(SEED)
    if data == RANDOM:
        drawn = _tensors(generator.integers(0, model.vocabulary, (samples, length)))
        note = "random tokens do not represent the text that the model will serve; use them only to try things out"
        return Samples(drawn, "random tokens", note)
    path, empty = Path(data), 0

    def filled() -> Iterator[Document]:
        nonlocal empty
        for document in _pieces(data):
            if document is not None:
                yield document
            else:
                empty += 1

    try:
        if path.is_file() and path.suffix.lower() == ".npy":
            sequences = tokens.read_samples(path, length)
            chosen = [sequences[i] for i in sorted(generator.permutation(len(sequences))[:samples])]
        else:
            documents = filled()
            if not tokens.is_dataset(data):  # which has a random order of its own
                documents = _shuffled([*documents], generator, progress)
            take = tokens.cut_stream if model.is_causal else _sample_each_text
            chosen = take(tokens.tokenize(model.checkpoint.folder, documents), length, samples)
    except SlideSparseError as error:
        raise type(error)(f"{option}: {error}") from error
    origin = "the reference of the Python language" if data == REFERENCE else path.name
    note = f"rows of {origin} without text, which are skipped: {empty}" * bool(empty)
    if not chosen:
        raise CalibrationError(
            f"{option} {data} gives no sample of {length} tokens{f' ({note})' * bool(note)}; give more text, or a "
            f"smaller --seqlen. Data are the words self or random, or {FORMS}"
        )
    tokens.require_ids(chosen, model.vocabulary, f"{option} {data}", model.checkpoint.folder)
    return Samples(_tensors(chosen), origin, note)


def _shuffled(
    documents: Sequence[Document], generator: np.random.Generator, progress: Progress
) -> Iterator[Document]:
    """Yield documents in a random order; report the characters that are done, and all when no more are wanted."""
    sizes = [len(str(document)) for document in documents]
    total, done = sum(sizes), 0
    try:
        for i in generator.permutation(len(documents)):
            yield documents[i]
            done += sizes[i]
            progress("reading", done, total)
    finally:
        progress("reading", total, total)


def _pieces(data: str) -> Iterator[Document | None]:
    """Yield the documents of a source, None for an empty row; a text in pieces, so that samples come from all of it."""
    if data == REFERENCE:
        yield from python_reference()
        return
    if tokens.form(data) != ".txt":
        yield from tokens.read_documents(data)
        return
    for text in tokens.read_documents(data):
        assert isinstance(text, str)
        start = 0
        while start < len(text):
            most = start + 2 * PIECE  # the tokenizer takes 200 times the memory of a document
            stop = text.find("\n", start + PIECE, most) + 1 or most
            yield text[start:stop]
            start = stop


def python_reference() -> list[str]:
    """Return the topics of the reference of the Python language, by name."""
    return [topics[name] for name in sorted(topics)]


def _sample_each_text(encoded: Iterable[list[int]], length: int, samples: int) -> list[np.ndarray]:
    """Make a sample of each text that has at least one token; a longer one keeps its last, which may end sequences."""
    texts = islice((ids for ids in encoded if ids), samples)
    return [
        np.asarray(ids if len(ids) <= length else [*ids[: length - 1], ids[-1]], dtype=np.int64)
        for ids in texts
    ]
