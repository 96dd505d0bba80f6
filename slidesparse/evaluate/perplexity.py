"""``slidesparse eval perplexity``: compare the perplexities of two served models on the same text.

The text is cut into windows of token ids, by the checkpoint's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slidesparse.checkpoint.storage import CONFIG, parse_json, text_config
from slidesparse.checkpoint.tokens import cut_stream, read_documents, read_samples, require_ids, tokenize
from slidesparse.errors import CheckFailed, SlideSparseError
from slidesparse.evaluate.engine import Scored, run

WINDOW = 2048  # tokens
ROUNDS, COVERAGE = 2000, 0.95  # of the bootstrap

Array = np.ndarray


def window_of(*folders: Path) -> int:
    """Return the window length in tokens for all checkpoints in ``folders``: WINDOW, or their least positions minus 1.

    vLLM generates one token after a window.  A config.json without a number of positions does not limit the window.
    """
    positions = [config_number(folder, "max_position_embeddings") for folder in folders]
    return min([WINDOW, *(count - 1 for count in positions if count)])


def config_number(folder: Path, key: str) -> int | None:
    """Return a number from config.json, or from its text_config, or None if there is none."""
    try:
        config = parse_json((folder / CONFIG).read_bytes(), CONFIG)
        return int({**config, **text_config(config)}[key])
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None  # vLLM will report what is wrong


def windows(data: str | Path, folder: Path, seqlen: int, samples: int | None) -> list[list[int]]:
    """Split data into consecutive windows of ``seqlen`` tokens for perplexity; return the first ``samples`` of them.

    Args:
        data: texts, as one stream, in a form that `read_documents` takes; or a .npy file of ids, a stream [tokens] or
            rows [samples, tokens].

    Raises SlideSparseError for data without a whole window.
    """
    if samples is not None and samples < 1:
        raise SlideSparseError(f"--samples {samples} is too few; leave it out to take all")
    if seqlen < 2:
        raise SlideSparseError(f"--seqlen {seqlen} is too short: the first token of a window is not scored")
    if Path(data).suffix.lower() == ".npy":
        found = read_samples(Path(data), seqlen)
    else:
        found = cut_stream(tokenize(folder, filter(None, read_documents(str(data)))), seqlen, samples)
    if not found:
        raise SlideSparseError(
            f"{data} gives no window of {seqlen} tokens; give more text, or a smaller --seqlen"
        )
    return [window.tolist() for window in found[:samples]]


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
    draws = (generator.integers(0, count, count) for _ in range(ROUNDS))
    resampled = [statistic(*(column[drawn] for column in columns)) for drawn in draws]
    low, high = np.quantile(resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(float(statistic(*columns)), float(low), float(high))


def ratio(above: Array, below: Array) -> Array:
    """Return the sum of ``above`` over the sum of ``below``, over the last dimension."""
    return np.asarray(above.sum(-1, dtype=np.float64) / below.sum(-1, dtype=np.float64))


def measure(
    model: Path,
    ids: Sequence[Sequence[int]],
    against: Path | None = None,
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
    longest = max(len(sample) for sample in ids) + 1  # vLLM generates one token
    options = {"enforce_eager": True, "max_model_len": longest, **(options or {})}
    scored = run(model, {"ids": ids}, options, log)
    reference = run(against, {"ids": ids}, options, log) if against else None
    return summarize(str(model), str(against), ids, scored, reference)


def summarize(
    model: str, against: str, ids: Sequence[Sequence[int]], scored: Scored, reference: Scored | None
) -> dict[str, Any]:
    """Compute the metrics from the engines' arrays, each as an `Interval`.

    They are named as ``--json`` prints them.  With a reference: its perplexity, and "delta_pct", the relative increase
    in perplexity over it, in percent, paired.  Raises CheckFailed for log-probabilities that are not finite.
    """
    for name, answer in ((model, scored), (against, reference)):
        if answer and (count := np.count_nonzero(~np.isfinite(answer.logprobs))):
            raise CheckFailed(
                f"{count} of {len(answer.logprobs)} log-probabilities by {name} are not finite, as if it lacked "
                "weights, or overflowed: fetch it again, or give --option dtype=float32"
            )
    lengths = np.asarray([len(sample) - 1 for sample in ids])
    losses = _sum_by_window(-scored.logprobs, lengths)
    result: dict[str, Any] = {
        "model": model,
        "windows": len(ids),
        "tokens": int(lengths.sum()),
        "perplexity": bootstrap(_perplexity, losses, lengths),
        "served_by": scored.served_by,
    }
    if reference is None:
        return result
    reference_losses = _sum_by_window(-reference.logprobs, lengths)
    return result | {
        "against": against,
        "against_served_by": reference.served_by,
        "against_perplexity": bootstrap(_perplexity, reference_losses, lengths),
        "delta_pct": bootstrap(
            lambda a, b, n: 100 * (np.exp(ratio(a, n) - ratio(b, n)) - 1), losses, reference_losses, lengths
        ),
    }


def _perplexity(losses: Array, lengths: Array) -> Array:
    return np.asarray(np.exp(ratio(losses, lengths)))


def _sum_by_window(values: Array, lengths: Array) -> Array:
    """Sum values [tokens] over each window, [windows]."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return np.asarray(np.add.reduceat(values.astype(np.float64), starts))
