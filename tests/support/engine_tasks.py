"""Tasks that `engines` runs with an engine: ``TASKS[name](llm, work)`` returns a dict, which becomes an `Answer`.

``work`` and the result are JSON objects.  The parent process imports this module too, so vLLM is imported late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

PROMPTS = [[(7 * i * j + 3) % 500 for j in range(1, 5 + 9 * i)] for i in range(1, 6)]

Json = dict[str, Any]


def _greedy(llm: Any, prompts: list[list[int]], tokens: int, lora: Any = None, **sampling: Any) -> list[Any]:
    """Return vLLM's outputs, each of exactly ``tokens`` tokens."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, **sampling)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, params, use_tqdm=False, lora_request=lora)  # type: ignore[no-any-return]


def _tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate(llm: Any, work: Json) -> Json:
    """Tokens after PROMPTS or those of ``work``."""
    return {"tokens": _tokens(_greedy(llm, work.get("prompts", PROMPTS), work.get("tokens", 16)))}


def logprobs(llm: Any, work: Json) -> Json:
    """The largest log-probability at each position of PROMPTS, and the first token after them."""
    outputs = _greedy(llm, PROMPTS, 1, prompt_logprobs=1)
    rows = [
        [max(entry.logprob for entry in position.values()) for position in output.prompt_logprobs[1:]]
        for output in outputs
    ]
    return {"tokens": _tokens(outputs), "logprobs": rows}


def embed(llm: Any, work: Json) -> Json:
    """The ``embeddings`` of ``prompts``."""
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in work["prompts"]], use_tqdm=False)
    return {"embeddings": [output.outputs.embedding for output in outputs]}


def prove(llm: Any, work: Json) -> Json:
    """``forced``: `_best` at each position of ``windows``, teacher-forced, window by window in one list;
    ``greedy``: `_best` of each of ``tokens`` new tokens after each of ``prompts``.
    """
    result: Json = {"greedy": [], "forced": []}
    for output in _greedy(llm, work["prompts"], work["tokens"], logprobs=2):
        result["greedy"].append([_best(position) for position in output.outputs[0].logprobs])
    for output in _greedy(llm, work["windows"], 1, prompt_logprobs=2) if work["windows"] else []:
        result["forced"] += [_best(position) for position in output.prompt_logprobs[1:]]
    return result


def _best(position: dict[int, Any]) -> list[float]:
    """Return [token, log-probability] of the best and the second-best token; ties go to the smaller token."""
    ordered = sorted((-entry.logprob, token) for token, entry in position.items())[:2]
    return [number for negative, token in ordered for number in (token, -negative)]


def mixed(llm: Any, work: Json) -> Json:
    """Tokens after the prompts of each of ``phases``, and the number of each prompt's tokens from the prefix cache."""
    result: Json = {"phases": [], "cached": []}
    for prompts in work["phases"]:
        outputs = _greedy(llm, prompts, work["tokens"])
        result["phases"].append(_tokens(outputs))
        result["cached"].append([output.num_cached_tokens for output in outputs])
    return result


def _reload(llm: Any, **options: Any) -> None:
    """Reload the weights as vLLM up to 0.25 does, which sets no current configuration meanwhile."""
    from slidesparse.vllm_patch import compat

    with mock.patch.object(compat, "current_config", side_effect=AssertionError("no configuration is set")):
        llm.collective_rpc("reload_weights", kwargs=options)


def reload(llm: Any, work: Json) -> Json:
    """Tokens after reloading the weights."""
    _reload(llm)
    return generate(llm, work)


def reload_after_dummy(llm: Any, work: Json) -> Json:
    """Tokens after an engine that started with random weights reloads those of the checkpoint."""
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
    return reload(llm, work)


def reload_other(llm: Any, work: Json) -> Json:
    """Tokens with the weights of the engine's model, then with those of ``other``, then with the first again."""
    turns = [generate(llm, work)["tokens"]]
    for path in (work["other"], work["model"]):
        _reload(llm, weights_path=path)
        turns.append(generate(llm, work)["tokens"])
    return {"turns": turns}


def adapters(llm: Any, work: Json) -> Json:
    """Tokens without an adapter, with that in the folder ``adapter``, and of a batch that alternates between both."""
    from vllm.lora.request import LoRARequest

    prompts, lora = work["prompts"], LoRARequest("adapter", 1, work["adapter"])
    plain = _tokens(_greedy(llm, prompts, work["tokens"]))
    adapted = _tokens(_greedy(llm, prompts, work["tokens"], lora))
    every_second = [lora if i % 2 else None for i in range(len(prompts))]
    mixed = _tokens(_greedy(llm, prompts, work["tokens"], every_second))
    return {"plain": plain, "adapted": adapted, "mixed": mixed}


def profile(llm: Any, work: Json) -> Json:
    """The table that SLIDESPARSE_PROFILE prints when a process ends, after some generation."""
    from slidesparse import profiling

    return {**generate(llm, work), "table": profiling.table()}


def sleep(llm: Any, work: Json) -> Json:
    """Tokens before and after a sleep of level 1, and the GPU's free bytes before, during and after it."""
    import torch

    result = {"before": generate(llm, work)["tokens"], "free": [torch.cuda.mem_get_info()[0]]}
    result["weights"], result["in_pool"] = llm.collective_rpc(_weight_bytes)[0]
    llm.sleep(level=1)
    result["free"].append(torch.cuda.mem_get_info()[0])
    llm.wake_up()
    result["free"].append(torch.cuda.mem_get_info()[0])
    result["after"] = generate(llm, work)["tokens"]
    return result


def loading(llm: Any, work: Json) -> Json:
    """The time and memory in which the engine's process has loaded the weights."""
    from timed_loading import MEASURED

    return dict(MEASURED)


def _weight_bytes(worker: Any) -> tuple[int, int]:
    """Bytes of the model's parameters, and of those in memory that is released during sleep."""
    from vllm.device_allocator.cumem import CuMemAllocator

    pool = CuMemAllocator.get_instance().pointer_to_data
    spans = [(start, start + data.handle[1]) for start, data in pool.items() if data.tag == "weights"]
    inside = total = 0
    for parameter in worker.get_model().parameters():
        total += parameter.nbytes
        if any(start <= parameter.data_ptr() < end for start, end in spans):
            inside += parameter.nbytes
    return total, inside


TASKS: dict[str, Callable[[Any, Json], Json]] = {
    "generate": generate,
    "strip_env": generate,
    "logprobs": logprobs,
    "embed": embed,
    "prove": prove,
    "mixed": mixed,
    "reload": reload,
    "reload_after_dummy": reload_after_dummy,
    "reload_other": reload_other,
    "adapters": adapters,
    "profile": profile,
    "sleep": sleep,
    "loading": loading,
}
