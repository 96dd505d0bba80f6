"""A program that scores and continues token ids with one vLLM engine, started by `slidesparse.evaluate.engine`.

It reads a JSON object from stdin: ``model``, ``options`` of vllm.LLM, and what to do: ``ids`` of samples to score;
``prompts`` of ids to continue, each with its ``sampling`` parameters.  It writes a JSON object to the file named by its
argument: ``logprobs`` of all tokens but the first of each sample, in one list, and ``outputs``, the ids that continue
each prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from slidesparse.files import write_atomically

CHUNK_SAMPLES = 64  # that are scored at a time: vLLM returns some hundred bytes for each of their tokens
CHUNK_PROMPTS = 512  # that are continued at a time, as many as vLLM runs at once


def request_logprobs(llm: Any, samples: list[list[int]]) -> list[float]:
    """Request the log-probabilities of all tokens but the first of each of ``samples`` from an engine."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    logprobs: list[float] = []
    for start in range(0, len(samples), CHUNK_SAMPLES):
        chunk = samples[start : start + CHUNK_SAMPLES]
        prompts = [{"prompt_token_ids": sample} for sample in chunk]
        for sample, output in zip(chunk, llm.generate(prompts, sampling, use_tqdm=False), strict=True):
            entries = zip(sample[1:], output.prompt_logprobs[1:], strict=True)
            logprobs += [position[token].logprob for token, position in entries]
    return logprobs


def generate(llm: Any, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[list[int]]:
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
    return outputs


def main() -> None:
    """Process the request on stdin."""
    from vllm import LLM

    request = json.load(sys.stdin)
    llm = LLM(request["model"], skip_tokenizer_init=True, **request["options"])
    answer = {
        "logprobs": request_logprobs(llm, request.get("ids", [])),
        "outputs": generate(llm, request.get("prompts", []), request.get("sampling", [])),
    }
    write_atomically(Path(sys.argv[1]), json.dumps(answer).encode())


if __name__ == "__main__":
    main()
