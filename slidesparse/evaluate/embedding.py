"""``slidesparse eval embedding``: compare the embeddings of two served models, and measure retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slidesparse.errors import SlideSparseError
from slidesparse.evaluate.engine import Engine
from slidesparse.evaluate.intervals import Array, Interval, bootstrap, mean
from slidesparse.evaluate.texts import Texts

NEAREST = 10


@dataclass(frozen=True)
class Embedding:
    """The metrics: those of retrieval are None without pairs, those of the comparison None without a reference."""

    model: str
    against: str | None
    texts: int
    cosine_mean: Interval | None
    cosine_p1: Interval | None  # first percentile
    # share of the reference's ten nearest documents that the model also ranks in its ten
    top10: Interval | None
    mrr: Interval | None
    mrr_against: Interval | None
    mrr_loss: Interval | None  # paired
    served_by: str
    against_served_by: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        if self.against is None:
            del fields["against_served_by"]
        return {name: v.to_json() if isinstance(v, Interval) else v for name, v in fields.items()}


def measure(
    model: Path, texts: Texts, against: Path | None = None, engine: Engine | None = None
) -> Embedding:
    """Embed ``texts`` with ``model`` and with ``against``; intervals resample texts, or pairs.

    Raises SlideSparseError if there is nothing to measure, and if an engine fails.
    """
    if against is None and texts.documents is None:
        raise SlideSparseError(
            "texts alone measure nothing: give --against DIR, such as the original model, or --data with pairs of "
            '"query" and "text"'
        )
    engine = engine or Engine()
    ids = [*texts.queries, *(texts.documents or [])]
    scored = engine.score(model, "embedding", ids)
    reference = engine.score(against, "embedding", ids) if against else None
    return summarize(
        str(model),
        str(against) if against else None,
        scored.arrays["embeddings"],
        reference.arrays["embeddings"] if reference else None,
        texts.documents is not None,
        (scored.served_by, reference.served_by if reference else ""),
    )


def summarize(
    model: str,
    against: str | None,
    embeddings: Array,
    reference: Array | None,
    paired: bool,
    served: tuple[str, str],
) -> Embedding:
    """Compute the metrics from embeddings [texts, hidden]; pairs are all queries followed by all documents."""
    embeddings = _unit(embeddings)
    reference = None if reference is None else _unit(reference)
    cosines = None if reference is None else (embeddings * reference).sum(-1)
    retrieval = _retrieval(embeddings) if paired else None
    reference_retrieval = _retrieval(reference) if paired and reference is not None else None
    overlap = mrr_loss = None
    if retrieval and reference_retrieval:
        pairs = zip(retrieval.nearest, reference_retrieval.nearest, strict=True)
        overlap = np.asarray([len(set(a) & set(b)) / len(b) for a, b in pairs])
        mrr_loss = bootstrap(mean, reference_retrieval.reciprocal - retrieval.reciprocal)
    return Embedding(
        model=model,
        against=against,
        texts=len(embeddings),
        cosine_mean=None if cosines is None else bootstrap(mean, cosines),
        cosine_p1=None if cosines is None else bootstrap(lambda x: np.quantile(x, 0.01, axis=-1), cosines),
        top10=None if overlap is None else bootstrap(mean, overlap),
        mrr=bootstrap(mean, retrieval.reciprocal) if retrieval else None,
        mrr_against=bootstrap(mean, reference_retrieval.reciprocal) if reference_retrieval else None,
        mrr_loss=mrr_loss,
        served_by=served[0],
        against_served_by=served[1],
    )


@dataclass(frozen=True)
class _Retrieval:
    reciprocal: Array  # [pairs], 1 / rank of a query's own document
    nearest: Array  # [pairs, NEAREST] indices of documents


def _retrieval(embeddings: Array) -> _Retrieval:
    """Rank the documents of all pairs for every query; ties rank the query's own document last."""
    queries, documents = np.split(embeddings, 2)
    similar = queries @ documents.T
    own = similar.diagonal()[:, None]
    ranks = (similar >= own).sum(1)
    count = min(NEAREST, len(documents))
    nearest = np.argsort(-similar, axis=1, kind="stable")[:, :count]
    return _Retrieval(1 / ranks, nearest)


def _unit(vectors: Array) -> Array:
    vectors = vectors.astype(np.float64)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))
