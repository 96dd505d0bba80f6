"""Text that a model writes itself, to calibrate it or to distill it where no other text is at hand.

Half of the samples continue a random token, half the point where the user's turn begins in the chat template; without a
template, all continue random tokens.  Tokens are drawn from the model's own distribution (temperature 1), across the
ends of texts.  On a GPU, vLLM writes where it is installed.  Otherwise transformers' modules do, with weights from our
own reader, which knows more types of checkpoints.

What was written is kept in the user's cache, a file of ids [samples, tokens] for each model, kind of prompts, and
length.  Where more samples are needed, others are appended, so that a number of samples always stands for the same
ones.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slidesparse import files
from slidesparse.build.compile import cache_folder, make_folder
from slidesparse.calibrate.inputs import free_bytes
from slidesparse.calibrate.model import Model
from slidesparse.checkpoint.tokens import automatic_tokenizer, require_ids, templated
from slidesparse.errors import LOGGER, CalibrationError, SlideSparseError, is_out_of_memory
from slidesparse.evaluate.engine import run
from slidesparse.progress import Progress
from slidesparse.serving import is_available

SELF = "self"  # in place of a file
DISTILLATION_TOKENS = {"cpu": 2**16, "cuda": 2**22}  # that are written for --distill
BATCH = 32  # samples that transformers writes at a time
GPU_SHARE = 0.9  # of its free memory, for vLLM
MARK = "slidesparse"  # a word in place of the user's message
ID_BYTES = 4

_logger = logging.getLogger(LOGGER)

Ids = list[int]
Report = Callable[[int], None]  # called with the number of tokens written so far


def write(model: Model, samples: int, length: int, progress: Progress, option: str) -> tuple[np.ndarray, str]:
    """Return text that the model has written, or writes now, int32 [samples, length], and a hint for the user or "".

    Args:
        progress: called with the phase, and the bytes of ids written and in all.
        option: name of the data in error messages.

    Raises CalibrationError for a model that does not predict tokens, or that nothing here can run whole.
    """
    if model.other_use or not (model.skeleton.generates and model.is_causal):
        reason = model.other_use or "this one is an encoder"
        raise CalibrationError(
            f"{option} self needs a model that predicts tokens, but {reason}; give text: {option} FILE.jsonl"
        )
    prompts, note = _prompts(model, max(samples, 2), length)
    require_ids(prompts, model.vocabulary, f"{option} self: the chat template", model.checkpoint.folder)
    known = f"2 {model.checkpoint.fingerprint} {length} {prompts[:2]}"
    make_folder(cache_folder() / "texts")
    folder = cache_folder() / "texts" / hashlib.sha256(known.encode()).hexdigest()[:32]
    make_folder(folder)
    with files.locked(folder):  # waits for another run that writes the same
        path, texts = folder / "ids.json", list[Ids]()
        with suppress(files.DamagedFile):  # written again
            texts = files.read_json(path) or []
        if len(texts) < samples:
            total = (samples - len(texts)) * length

            def report(tokens: int) -> None:
                progress("writing", ID_BYTES * tokens, ID_BYTES * total)

            report(0)
            texts = [*texts, *_write(model, prompts[len(texts) : samples], length, len(texts), report)]
            with suppress(OSError):  # what is not kept is written again
                files.write_json(path, texts)
    return np.asarray(texts[:samples], np.int32), note


def _write(model: Model, prompts: Sequence[Ids], length: int, seed: int, report: Report) -> Sequence[Ids]:
    """Continue ``prompts`` to samples of ``length`` ids.  A failure of vLLM is logged, as transformers is slower."""
    if model.device.type == "cuda" and is_available():
        try:
            return _by_vllm(model, prompts, length, seed, report)
        except SlideSparseError as error:
            reason = str(error).splitlines()[:2][-1]  # the first error of vLLM's log is the cause of others
            _logger.warning("transformers writes the text, which takes longer, as vLLM failed: %s", reason)
    too_large = CalibrationError(
        f"the whole model, which has to write its own text, does not fit into the memory of {model.device}; give text "
        "instead: FILE.jsonl"
    )
    values = sum(math.prod(tensor.spec.shape) for tensor in model.skeleton.checkpoint.tensors.values())
    if values * _dtype(model).itemsize > free_bytes(model.device):
        raise too_large
    try:
        return _by_transformers(model, prompts, length, seed, report)
    except Exception as error:
        if is_out_of_memory(error):
            raise too_large from None
        raise


def _prompts(model: Model, samples: int, length: int) -> tuple[list[Ids], str]:
    """Return what each sample begins with, and a hint for the user or ""."""
    start, turn, special = Ids(), Ids(), set[int]()
    count, reason = model.vocabulary, ""
    try:
        tokenizer = automatic_tokenizer(model.checkpoint.folder)
    except SlideSparseError as error:
        reason = str(error)
    else:
        count, special = min(count, len(tokenizer)), set(tokenizer.all_special_ids)
        start = tokenizer("")["input_ids"][:1]
        start = start if start == [tokenizer.bos_token_id] else []
        try:
            turn = _turn(tokenizer)
        except Exception as error:  # of Jinja or of the template, which may want other messages
            if tokenizer.chat_template:
                words = " ".join(f"{type(error).__name__}: {error}".split())
                reason = f"its chat template takes no single message of a user ({words})"
    plain = [token for token in range(count) if token not in special]
    begin_chats = 0 < len(turn) < length
    prompts = [
        turn if begin_chats and number % 2 else [*start, random.Random(number).choice(plain)]
        for number in range(samples)
    ]
    return prompts, f"all of the model's own text begins with random tokens, as {reason}" * bool(reason)


def _turn(tokenizer: Any) -> Ids:
    """Return the ids up to where the user's turn begins in the chat template."""
    chat = templated(tokenizer, [{"role": "user", "content": MARK}])
    return list(tokenizer(chat[: chat.index(MARK)], add_special_tokens=False)["input_ids"])


def _by_vllm(model: Model, prompts: Sequence[Ids], length: int, seed: int, report: Report) -> list[Ids]:
    free, total = torch.cuda.mem_get_info(model.device)
    options = {"seed": seed, "gpu_memory_utilization": GPU_SHARE * free / total, "max_model_len": length}
    options["enable_prefix_caching"] = False
    sampling = [{"max_tokens": length - len(ids), "temperature": 1.0, "ignore_eos": True} for ids in prompts]
    request = {"prompts": prompts, "sampling": sampling}
    written = run(model.checkpoint.folder, request, options, report=lambda done: report(done * length))
    return [prompt + output for prompt, output in zip(prompts, written.outputs, strict=True)]


@torch.inference_mode()
def _by_transformers(
    model: Model, prompts: Sequence[Ids], length: int, seed: int, report: Report
) -> list[Ids]:
    """Write in batches, in which the shorter prompts are first continued to the length of the longer ones."""
    whole: Any = assembled(model)
    lengths = sorted({*map(len, prompts), length})[1:]
    texts, done = [list(prompt) for prompt in prompts], 0
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]

            def count(x: Tensor, _: Any, done: int = done) -> Tensor:
                report(done + x.numel())
                return torch.zeros(len(x), dtype=torch.bool, device=x.device)

            for until in lengths:
                rows = [row for row, text in enumerate(batch) if len(text) < until]
                x = torch.tensor([batch[row] for row in rows], device=model.device)
                mask = torch.ones_like(x)
                out = whole.generate(x, attention_mask=mask, max_length=until, stopping_criteria=[count])
                for row, text in zip(rows, out.tolist(), strict=True):
                    batch[row] = text
            texts[start : start + BATCH] = batch
            done += len(batch) * length
    return texts


def assembled(model: Model) -> nn.Module:
    """Return the whole model of transformers with weights of our reader."""
    from transformers import GenerationConfig

    dtype = _dtype(model)

    def rounded(weights: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        return {prefix + name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}

    with model.checkpoint.reader() as reader:
        weights = rounded(model.ends(reader).weights)
        for number in range(model.blocks):
            weights |= rounded(model.load(reader, number).weights, model.skeleton.prefix(number))
    whole: Any = copy.deepcopy(model.skeleton.model)
    whole.load_state_dict(weights, strict=False, assign=True)
    whole.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
    )
    module: nn.Module = whole
    return module


def _dtype(model: Model) -> torch.dtype:
    """Return the dtype in which transformers runs a model: BF16 is slow on CPUs."""
    return torch.bfloat16 if model.device.type == "cuda" else torch.float32
