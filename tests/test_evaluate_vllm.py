"""Figures of quality through real vLLM: against our own layers, and against what the demo measures over HTTP."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from models import LLAMA, converted, write_float

from slidesparse import demo
from slidesparse.calibrate.forward import rms_norm
from slidesparse.calibrate.models import open_model
from slidesparse.checkpoint import Checkpoint
from slidesparse.convert import convert
from slidesparse.evaluate import embedding, perplexity
from slidesparse.evaluate.engine import Engine
from slidesparse.evaluate.texts import texts_or_pairs
from slidesparse.pattern import SlidePattern

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@torch.inference_mode()
def exact_logprobs(folder: Path, ids: list[list[int]]) -> np.ndarray:
    """[tokens] of each token but the first, by our own layers in float32."""
    model, found = open_model(Checkpoint.open(folder)), []
    with model.checkpoint.reader() as reader:
        samples = [torch.tensor(sample) for sample in ids]
        embed = model.embedder(reader, samples, torch.device("cpu"))
        blocks = [model.load(reader, number, torch.device("cpu")) for number in range(model.blocks)]
        norm, head = (reader.whole(name).float() for name in ("model.norm.weight", "lm_head.weight"))
        for sample in samples:
            x = embed(sample[None])
            for block in blocks:
                x = block.output(x)
            logprobs = (rms_norm(x, norm, model.shape.eps)[0] @ head.t()).log_softmax(-1)
            found += [float(logprobs[i, after]) for i, (_, after) in enumerate(pairwise(sample.tolist()))]
    return np.asarray(found)


def test_perplexity_through_vllm(tmp_path: Path) -> None:
    """The original as our own layers give it; the pruned one served by the plugin, and KL over all tokens."""
    source = write_float(LLAMA, tmp_path / "source")
    pruned = converted(source, tmp_path / "pruned", "6:8")
    ids = np.random.default_rng(0).integers(0, LLAMA.vocabulary, (3, 20)).tolist()
    how = Engine({"dtype": "float32", "gpu_memory_utilization": 0.2})
    found = perplexity.measure(pruned, ids, source, top=-1, engine=how)
    assert found.served_by.startswith("6:8 (2 of every 8 pruned): 8 layers sparse, 1 dense (1 lm_head)")
    assert found.against_served_by == ""
    assert found.comparison is not None
    expected = math.exp(-exact_logprobs(source, ids).mean())
    assert found.comparison.perplexity.value == pytest.approx(
        expected, rel=1e-4
    )  # float32, summed in another order
    assert found.comparison.exact
    assert found.comparison.kl.value > 0.01
    assert found.comparison.top1.value < 1


def test_embedding_through_vllm(tmp_path: Path) -> None:
    """MiniLM pruned by magnitude: the cosine that the demo measures over HTTP."""
    source = demo.original()
    convert(source, tmp_path / "pruned", pattern=SlidePattern.parse("6:8"))
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": sentence}) for sentence in demo.SENTENCES))
    how = Engine({"dtype": "float32", "gpu_memory_utilization": 0.2})
    found = embedding.measure(tmp_path / "pruned", texts_or_pairs(data, source, None), source, how)
    assert found.served_by.startswith("6:8 (2 of every 8 pruned): 24 layers sparse")
    assert found.cosine_mean is not None
    assert found.cosine_mean.value == pytest.approx(
        0.9330, abs=5e-4
    )  # a batch of another size rounds otherwise
    assert found.mrr is None
