"""Quality metrics through real vLLM, against transformers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import converted
from engines import Engines, Request
from models import LLAMA, write_float

from slidesparse.errors import SlideSparseError
from slidesparse.evaluate import perplexity
from slidesparse.evaluate.engine import Scored, run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@torch.inference_mode()
def exact_logprobs(folder: Path, ids: list[list[int]]) -> np.ndarray:
    """Return log-probabilities [tokens] of all but the first token, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs = model(torch.tensor(ids)).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(2, torch.tensor(ids)[:, 1:, None]).flatten().numpy()


def test_perplexity_by_vllm_is_that_of_transformers(engines: Engines, tmp_path: Path) -> None:
    """The plugin serves the pruned model."""
    source = write_float(LLAMA, tmp_path / "source")
    pruned = converted(source, tmp_path / "pruned", "6:8")
    ids = np.random.default_rng(0).integers(0, LLAMA.vocabulary, (3, 20)).tolist()

    def scored(folder: Path, env: dict[str, str]) -> Scored:
        response = engines.ask(Request(str(folder), env, task="perplexity", work={"ids": ids}))
        assert not response.error, f"{response.error}\n{response.log[-4000:]}"
        return Scored(np.asarray(response.logprobs), [], response.summary)

    pruned_scores, source_scores = scored(pruned, {}), scored(source, {"DISABLE_SLIDESPARSE": "1"})
    assert pruned_scores.served_by.startswith(
        "6:8 (2 of every 8 pruned): 8 layers sparse, 1 dense (1 lm_head)"
    )
    assert source_scores.served_by == ""
    result = perplexity.summarize("pruned", "source", ids, pruned_scores, source_scores)
    expected = math.exp(-exact_logprobs(source, ids).mean())
    # sums of float32 in another order
    assert result["against_perplexity"].value == pytest.approx(expected, rel=1e-4)
    assert result["delta_pct"].value != 0


def test_engine_process_scores_and_says_what_served(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that ``slidesparse eval`` starts, with the slided layout, and its log; it continues prompts, too."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # would hide the plugin's line
    source, log = write_float(LLAMA, tmp_path / "source"), tmp_path / "log"
    slided = converted(source, tmp_path / "slided", "6:8", "slided")
    options = {"dtype": "float32", "gpu_memory_utilization": 0.2, "enforce_eager": True}
    sampling = [{"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}] * 2
    request = {"ids": [[1, 2, 3, 4], [5, 6]], "prompts": [[1, 2], [3]], "sampling": sampling}
    done: list[int] = []
    scores = run(slided, request, {**options, "max_model_len": 8}, log, report=done.append)
    assert scores.served_by.startswith(
        "6:8 (2 of every 8 pruned): 8 layers sparse, 1 dense (1 lm_head); slided layout"
    )
    assert scores.logprobs.shape == (4,)
    assert scores.outputs == engines.serve(slided, work={"prompts": [[1, 2], [3]], "tokens": 3}).tokens
    assert done == [2]
    with pytest.raises(SlideSparseError, match=r"run .*source:\n.*ValidationError.*\n.*max_model_len"):
        run(source, {"ids": [[1, 2]]}, {**options, "max_model_len": 10**6}, log)
    headers = [line for line in log.read_text().splitlines() if line.startswith("# ")]
    assert headers == [f"# {slided}", f"# {source}"]
