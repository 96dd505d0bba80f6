"""One vLLM engine that scores and continues sequences of token ids, in the process that `texts.Engine` starts.

It reads a JSON object from stdin: ``model``, ``options`` of vllm.LLM, ``score`` and ``prompts``, both lists of ids, and
``sampling``, a list with the parameters of each prompt.  It writes ``nll``, the mean negative log-likelihood of each
scored sequence but its first token, and ``outputs``, the ids that continue each prompt, to the JSON file named by its
argument.
"""

from __future__ import annotations

import json
import sys
from typing import Any

CHUNK = 64  # scored sequences at a time: each log-probability is a Python object


def main() -> None:
    """Process the request on stdin."""
    from vllm import LLM, SamplingParams

    request: dict[str, Any] = json.load(sys.stdin)
    llm = LLM(request["model"], skip_tokenizer_init=True, enable_prefix_caching=False, **request["options"])
    nll: list[float] = []
    scoring = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    for start in range(0, len(request["score"]), CHUNK):
        chunk = request["score"][start : start + CHUNK]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in chunk], scoring, use_tqdm=False)
        for ids, output in zip(chunk, outputs, strict=True):
            pairs = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
            nll.append(-sum(position[token].logprob for token, position in pairs) / (len(ids) - 1))
    parameters = [SamplingParams(detokenize=False, **each) for each in request["sampling"]]
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    outputs = llm.generate(prompts, parameters, use_tqdm=False) if prompts else []
    found = {"nll": nll, "outputs": [list(output.outputs[0].token_ids) for output in outputs]}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(found, file)
