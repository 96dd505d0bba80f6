"""Figures of quality: each against a plain computation, and the engine that they come from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slidesparse.evaluate import embedding, perplexity
from slidesparse.evaluate.engine import Scored
from slidesparse.evaluate.intervals import bootstrap, mean, percentile

VOCABULARY = 12


# Divergence


def distributions(tokens: int, seed: int) -> np.ndarray:
    """Log-probabilities [tokens, VOCABULARY]."""
    scores = np.random.default_rng(seed).normal(0, 2, (tokens, VOCABULARY))
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def likeliest(logprobs: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argsort(-logprobs, axis=1)[:, :top]
    return ids, np.take_along_axis(logprobs, ids, axis=1)


def lumped(p: np.ndarray, q: np.ndarray, top: int) -> float:
    """KL of two distributions, tokens among the likeliest of both apart and the others as one: written out."""
    both = set(np.argsort(-p)[:top]) & set(np.argsort(-q)[:top])
    rest = [token for token in range(len(p)) if token not in both]
    atoms = [(math.exp(p[token]), math.exp(q[token])) for token in both]
    if rest:
        atoms.append((sum(math.exp(p[token]) for token in rest), sum(math.exp(q[token]) for token in rest)))
    return sum(a * math.log(a / b) for a, b in atoms)


@pytest.mark.parametrize("top", [1, 3, 7, VOCABULARY])
def test_divergence_is_that_of_the_lumped_distributions(top: int) -> None:
    p, q = distributions(50, 0), distributions(50, 1)
    found = perplexity.divergence(*likeliest(p, top), *likeliest(q, top))
    whole = (np.exp(p) * (p - q)).sum(-1)
    for row in range(50):
        assert found[row] == pytest.approx(lumped(p[row], q[row], top), abs=1e-9)
        assert found[row] <= whole[row] + 1e-9
    if top == VOCABULARY:
        assert found == pytest.approx(whole, abs=1e-9)
    assert perplexity.divergence(*likeliest(p, top), *likeliest(p, top)) == pytest.approx(0, abs=1e-12)


# Intervals


def test_the_interval_of_a_mean_is_that_of_theory() -> None:
    values = np.random.default_rng(0).normal(5.0, 2.0, 4000)
    found = bootstrap(mean, values)
    half = 1.96 * values.std() / 4000**0.5
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.value == pytest.approx(half, rel=0.1)  # 2000 rounds give the ends to some 4%
    assert found.value - found.low == pytest.approx(half, rel=0.1)
    assert bootstrap(mean, values) == found


def test_pairs_stay_together() -> None:
    values = np.random.default_rng(0).normal(0.0, 100.0, 50)
    found = bootstrap(lambda a, b: mean(a) - mean(b), values + 0.5, values)
    assert (found.low, found.value, found.high) == pytest.approx((0.5, 0.5, 0.5), abs=1e-9)


def test_percentile_and_rounds_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1001.0)
    whole = bootstrap(percentile(0.01), values)
    assert whole.value == 10.0
    assert whole.low < 10 < whole.high
    monkeypatch.setattr("slidesparse.evaluate.intervals.DRAWS", 5000)
    in_parts = bootstrap(percentile(0.01), values)
    assert in_parts.value == 10.0
    assert abs(in_parts.low - whole.low) <= 2


# Perplexity


def scored(logprobs: np.ndarray, tops: np.ndarray, top: int = 3) -> Scored:
    ids, values = likeliest(tops, top)
    return Scored({"logprobs": logprobs, "top_ids": ids, "top_logprobs": values}, "")


def test_perplexity_and_its_comparison() -> None:
    ids = [[1] * 5, [1] * 9, [1] * 3]
    generator = np.random.default_rng(0)
    ours, theirs = (generator.normal(-3, 1, 14) for _ in range(2))
    p, q = distributions(14, 0), distributions(14, 1)
    found = perplexity.summarize("a", "b", ids, scored(ours, p), scored(theirs, q))
    assert (found.windows, found.tokens) == (3, 14)
    assert found.perplexity.value == pytest.approx(math.exp(-ours.mean()))
    compared = found.comparison
    assert compared is not None
    assert compared.perplexity.value == pytest.approx(math.exp(-theirs.mean()))
    assert compared.delta_pct.value == pytest.approx(100 * (math.exp(theirs.mean() - ours.mean()) - 1))
    assert compared.top1.value == pytest.approx(np.mean(p.argmax(1) == q.argmax(1)))
    assert compared.kl.value == pytest.approx(np.mean([lumped(q[i], p[i], 3) for i in range(14)]), abs=1e-6)
    assert not compared.exact
    exact = perplexity.summarize("a", "b", ids, scored(ours, p, VOCABULARY), scored(theirs, q, VOCABULARY))
    assert exact.comparison is not None
    assert exact.comparison.exact
    assert set(exact.to_json()) - set(found.to_json()) == {"kl"}


def test_a_model_beside_itself() -> None:
    p = distributions(8, 0)
    same = scored(np.linspace(-4, -1, 8), p)
    found = perplexity.summarize("a", "a", [[1] * 5, [1] * 5], same, same).comparison
    assert found is not None
    assert (found.delta_pct.low, found.delta_pct.high, found.top1.value) == (0.0, 0.0, 1.0)
    assert found.kl.value == pytest.approx(0, abs=1e-12)


# Embeddings


def test_retrieval_is_what_sorting_gives() -> None:
    generator = np.random.default_rng(0)
    ours, theirs = generator.normal(size=(60, 8)), generator.normal(size=(60, 8))
    ours[30:] += 0.8 * ours[:30]  # documents near their queries
    theirs += ours
    found = embedding.summarize("a", "b", ours, theirs, True, ("", ""))

    def by_hand(vectors: np.ndarray) -> tuple[list[float], list[set[int]]]:
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        reciprocal, nearest = [], []
        for i in range(30):
            order = sorted(range(30), key=lambda j: -float(unit[i] @ unit[30 + j]))
            reciprocal.append(1 / (1 + order.index(i)))
            nearest.append(set(order[:10]))
        return reciprocal, nearest

    (mine, near), (reference, wanted) = by_hand(ours), by_hand(theirs)
    assert found.mrr is not None
    assert found.mrr.value == pytest.approx(np.mean(mine))
    assert found.mrr_against is not None
    assert found.mrr_against.value == pytest.approx(np.mean(reference))
    assert found.mrr_loss is not None
    assert found.mrr_loss.value == pytest.approx(np.mean(reference) - np.mean(mine))
    assert found.top10 is not None
    assert found.top10.value == pytest.approx(
        np.mean([len(a & b) / 10 for a, b in zip(near, wanted, strict=True)])
    )
    assert found.cosine_mean is not None
    cosines = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert found.cosine_mean.value == pytest.approx(cosines.mean())
    assert found.cosine_p1 is not None
    assert found.cosine_p1.value == pytest.approx(np.quantile(cosines, 0.01))


def test_embeddings_that_are_all_alike_find_nothing() -> None:
    found = embedding.summarize("a", None, np.ones((20, 4)), None, True, ("", ""))
    assert found.mrr is not None
    assert found.mrr.value == pytest.approx(1 / 10)
    assert (found.cosine_mean, found.top10, found.mrr_loss) == (None, None, None)
    assert set(found.to_json()) == {"model", "texts", "mrr", "served_by"}
