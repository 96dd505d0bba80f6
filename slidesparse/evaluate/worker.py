"""A program that scores and continues token ids with one vLLM engine, started by `slidesparse.evaluate.engine`.

It reads a JSON object from stdin: ``model``, ``options`` of vllm.LLM, and what to do: ``ids`` of samples to score, with
the number ``top`` of likely tokens to return; ``prompts`` of ids to continue, each with its ``sampling`` parameters.
It writes arrays to the ``.npz`` file named by its argument: logprobs [tokens] of all tokens but the first of each
sample; top_ids and top_logprobs [tokens, top], the most likely first; outputs [tokens], the ids that continue the
prompts, joined, and lengths [prompts], how many of them belong to each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

CHUNK_SAMPLES = 64  # samples at a time; fewer if they have more log-probabilities than MAX_LOGPROBS_AT_ONCE
CHUNK_PROMPTS = 512  # that are continued at a time, as many as vLLM runs at once
MAX_LOGPROBS_AT_ONCE = 10**7  # vLLM returns each log-probability as a Python object of about 200 bytes


def request_logprobs(llm: Any, all_samples: list[list[int]], top: int) -> dict[str, np.ndarray]:
    """Request the log-probabilities of ``all_samples`` from an engine; with a ``top`` of 0, of their tokens alone."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=top, detokenize=False)
    logprobs, ids, tops = [], [], []
    width = max(1, top) if top >= 0 else llm.llm_engine.model_config.get_vocab_size()
    longest = max((len(sample) for sample in all_samples), default=1)
    chunk = max(1, min(CHUNK_SAMPLES, MAX_LOGPROBS_AT_ONCE // (width * longest)))
    for start in range(0, len(all_samples), chunk):
        samples = all_samples[start : start + chunk]
        prompts = [{"prompt_token_ids": sample} for sample in samples]
        for sample, output in zip(samples, llm.generate(prompts, sampling, use_tqdm=False), strict=True):
            for token, position in zip(sample[1:], output.prompt_logprobs[1:], strict=True):
                likeliest = sorted(position.items(), key=lambda item: item[1].rank)
                likeliest = likeliest[: len(likeliest) if top < 0 else top]
                logprobs.append(position[token].logprob)
                ids.append([token_id for token_id, _ in likeliest])
                tops.append([entry.logprob for _, entry in likeliest])
    return {
        "logprobs": np.asarray(logprobs, np.float32),
        "top_ids": np.asarray(ids, np.int32),
        "top_logprobs": np.asarray(tops, np.float32),
    }


def generate(llm: Any, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Let an engine continue ``prompts``, and print how many are done, as `slidesparse.evaluate.engine.run` reads."""
    from vllm import SamplingParams

    outputs: list[list[int]] = []
    for start in range(0, len(prompts), CHUNK_PROMPTS):
        chunk = slice(start, start + CHUNK_PROMPTS)
        parameters = [SamplingParams(detokenize=False, **each) for each in sampling[chunk]]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts[chunk]]
        found = llm.generate(requests, parameters, use_tqdm=False)
        outputs += [list(output.outputs[0].token_ids) for output in found]
        print(f"prompts done: {len(outputs)}", flush=True)
    return {
        "outputs": np.asarray([token for output in outputs for token in output], np.int32),
        "lengths": np.asarray([len(output) for output in outputs], np.int64),
    }


def main() -> None:
    """Process the request on stdin."""
    from vllm import LLM

    request = json.load(sys.stdin)
    top = request.get("top", 0)
    llm = LLM(request["model"], max_logprobs=top, skip_tokenizer_init=True, **request["options"])
    arrays: dict[str, Any] = request_logprobs(llm, request.get("ids", []), top)
    arrays |= generate(llm, request.get("prompts", []), request.get("sampling", []))
    np.savez(sys.argv[1], **arrays)


if __name__ == "__main__":
    main()
