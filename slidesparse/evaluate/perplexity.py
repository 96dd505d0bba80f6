"""``slidesparse eval perplexity``: compare the perplexities of two served models on the same text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slidesparse.checkpoint.tokens import require_ids
from slidesparse.errors import SlideSparseError
from slidesparse.evaluate.engine import Scored, score
from slidesparse.evaluate.texts import config_number
from slidesparse.evaluate.worker import MAX_LOGPROBS_AT_ONCE

TOP = 20  # most likely tokens to compare, vLLM's default limit; -1 for all
MAX_LOGPROBS = 2 * 10**8  # log-probabilities of all windows, of 8 bytes each
ROUNDS, COVERAGE = 2000, 0.95  # of the bootstrap
DRAWS = 2**24  # indices drawn at a time

Array = np.ndarray


@dataclass(frozen=True)
class Interval:
    """An estimate and its bootstrap confidence interval at level COVERAGE."""

    value: float
    ci_low: float
    ci_high: float


def bootstrap(statistic: Callable[..., Array], *columns: Array) -> Interval:
    """Return the percentile interval of ``statistic``, a function of arrays [..., samples] that returns [...].

    Each of the ``columns`` has shape [samples].  A draw takes the same samples from all of them, so their values stay
    paired.
    """
    count = len(columns[0])
    generator = np.random.default_rng(0)
    resampled, step = [], max(1, DRAWS // max(1, count))
    for start in range(0, ROUNDS, step):
        drawn = generator.integers(0, count, (min(step, ROUNDS - start), count))
        resampled.append(statistic(*(column[drawn] for column in columns)))
    low, high = np.quantile(np.concatenate(resampled), [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(float(statistic(*columns)), float(low), float(high))


def ratio(above: Array, below: Array) -> Array:
    """Return the sum of ``above`` over the sum of ``below``, over the last dimension."""
    return np.asarray(above.sum(-1, dtype=np.float64) / below.sum(-1, dtype=np.float64))


def measure(
    model: Path,
    ids: Sequence[Sequence[int]],
    against: Path | None = None,
    top: int = TOP,
    options: Mapping[str, Any] | None = None,
    log: Path | None = None,
) -> dict[str, Any]:
    """Score the windows ``ids`` with ``model`` and with ``against``; return what `summarize` does.

    Perplexity is exp of the mean negative log-probability of all tokens but the first of each window; intervals
    resample windows.  Raises SlideSparseError for unusable options or ids, and if an engine fails.
    """
    for folder in (model, *([against] if against else [])):
        vocabulary = config_number(folder, "vocab_size")
        if vocabulary:
            require_ids(ids, vocabulary, "--data", folder)
        _require_top(ids, top, vocabulary)
    scored = score(model, ids, top, options, log)
    reference = score(against, ids, top, options, log) if against else None
    return summarize(str(model), str(against), ids, scored, reference)


def _require_top(ids: Sequence[Sequence[int]], top: int, vocabulary: int | None) -> None:
    """Raise SlideSparseError unless ``top`` log-probabilities a token exist and fit into memory."""
    if top == 0 or top < -1 or (vocabulary and top > vocabulary):
        limit = f" to {vocabulary}" if vocabulary else ""
        raise SlideSparseError(f"--top {top}: use 1{limit}, or -1 for the whole vocabulary")
    per_token = top if top > 0 else vocabulary or 1
    longest, tokens = max(len(sample) for sample in ids), sum(len(sample) for sample in ids)
    most = min(MAX_LOGPROBS_AT_ONCE // longest, MAX_LOGPROBS // tokens)
    if per_token > most:
        raise SlideSparseError(
            f"--top {top} asks for {per_token} log-probabilities of each of {tokens} tokens, more than memory holds; "
            f"use --top {most} or less, or fewer tokens: --samples and --seqlen"
        )


def summarize(
    model: str, against: str, ids: Sequence[Sequence[int]], scored: Scored, reference: Scored | None
) -> dict[str, Any]:
    """Compute the metrics from the engines' arrays, each as an `Interval`.

    They are named as ``--json`` prints them.  With a reference: its perplexity; "delta_pct", the relative increase in
    perplexity over it, in percent, paired; "top1_agreement", the share of positions with the same most likely token;
    and "kl", the mean KL(reference || model) in nats, or "kl_at_least" if the tokens are not the whole vocabulary.
    """
    lengths = np.asarray([len(sample) - 1 for sample in ids])
    losses = _sum_by_window(-scored.arrays["logprobs"], lengths)
    result: dict[str, Any] = {
        "model": model,
        "windows": len(ids),
        "tokens": int(lengths.sum()),
        "perplexity": bootstrap(_perplexity, losses, lengths),
        "served_by": scored.served_by,
    }
    if reference is None:
        return result
    reference_losses = _sum_by_window(-reference.arrays["logprobs"], lengths)
    same = scored.arrays["top_ids"][:, 0] == reference.arrays["top_ids"][:, 0]
    kl = divergence(*(s.arrays[name] for s in (reference, scored) for name in ("top_ids", "top_logprobs")))
    mass = np.exp(reference.arrays["top_logprobs"].astype(np.float64)).sum(-1).min()
    return result | {
        "against": against,
        "against_served_by": reference.served_by,
        "against_perplexity": bootstrap(_perplexity, reference_losses, lengths),
        "delta_pct": bootstrap(
            lambda a, b, n: 100 * (np.exp(ratio(a, n) - ratio(b, n)) - 1), losses, reference_losses, lengths
        ),
        "top1_agreement": bootstrap(ratio, _sum_by_window(same, lengths), lengths),
        "kl" if mass > 1 - 1e-4 else "kl_at_least": bootstrap(ratio, _sum_by_window(kl, lengths), lengths),
    }


def _perplexity(losses: Array, lengths: Array) -> Array:
    return np.asarray(np.exp(ratio(losses, lengths)))


def _sum_by_window(values: Array, lengths: Array) -> Array:
    """Sum values [tokens] over each window, [windows]."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return np.asarray(np.add.reduceat(values.astype(np.float64), starts))


def divergence(p_ids: Array, p_logprobs: Array, q_ids: Array, q_logprobs: Array) -> Array:
    """Return KL(p || q) at each position, [tokens], from the most likely tokens of both, [tokens, top] each.

    Tokens listed for both count individually, and all others as one.  Merging outcomes never increases a KL divergence,
    so this is a lower bound, and exact if both list the whole vocabulary.
    """
    divergences = np.empty(len(p_ids))
    for i, tokens in enumerate(zip(p_ids, q_ids, strict=True)):
        _, of_p, of_q = np.intersect1d(*tokens, assume_unique=True, return_indices=True)
        p, q = p_logprobs[i, of_p].astype(np.float64), q_logprobs[i, of_q].astype(np.float64)
        p_rest, q_rest = max(0.0, 1 - np.exp(p).sum()), max(1e-12, 1 - np.exp(q).sum())
        divergences[i] = (np.exp(p) * (p - q)).sum() + p_rest * np.log((p_rest or q_rest) / q_rest)
    return divergences
