"""Token ids of the texts on which models are scored and calibrated, and the engine that scores and continues them.

Three kinds of text, in windows of WINDOW tokens:

own         text that the model wrote itself: its calibration samples are of this kind
wikitext2   the validation text of WikiText-2, a file that the user gives
python      the reference of the Python language, which comes with every Python (`pydoc_data.topics`); it changes a
            little from one minor version to the next
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slidesparse.errors import EnvironmentFault, SlideSparseError

WINDOW = 1024  # tokens
OWN, WIKITEXT, PYTHON = "own", "wikitext2", "python"
MARK = "slidesparse"  # a word in place of the user's message
LAST_CHARACTERS = 2000  # of a program's output, in an error
ROOT = Path(__file__).parents[2]

Ids = list[int]


def tokenizer_of(model: Path) -> Any:
    """Return the tokenizer of a Hugging Face folder.  Raises EnvironmentFault without transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EnvironmentFault(f"{error}; install what this needs: pip install '.[accuracy]'") from error
    return AutoTokenizer.from_pretrained(str(model))


def windows(tokenizer: Any, text: str, count: int) -> list[Ids]:
    """Return the first windows of a text."""
    ids = tokenizer(text)["input_ids"]
    return [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(min(count, len(ids) // WINDOW))]


def python_reference() -> str:
    """Return the topics of the reference of the Python language, by name."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


@dataclass(frozen=True)
class Engine:
    """How vLLM serves a model."""

    share: float = 0.85  # of the GPU's memory
    gpu: str | None = None  # CUDA_VISIBLE_DEVICES; None leaves it as it is
    cache: Path | None = None  # of code that vLLM compiles, which processes that run at once must not share

    def run(
        self,
        model: Path,
        score: Sequence[Ids] = (),
        prompts: Sequence[Ids] = (),
        sampling: Sequence[Mapping[str, Any]] = (),
        seed: int = 0,
    ) -> tuple[np.ndarray, list[Ids]]:
        """Return the mean negative log-likelihood of each sequence of ``score``, and what continues ``prompts``.

        Args:
            sampling: vLLM's sampling parameters of each prompt.

        Raises SlideSparseError if the engine fails.
        """
        longest = max([len(ids) + 1 for ids in score], default=0)
        longest = max(
            [longest, *(len(ids) + s["max_tokens"] for ids, s in zip(prompts, sampling, strict=True))]
        )
        options = {"max_model_len": longest, "gpu_memory_utilization": self.share, "seed": seed}
        options |= {
            "max_num_seqs": 256,
            "max_num_batched_tokens": 4096,
        }  # logits of all tokens of a step are kept
        request = {"model": str(model), "options": options, "score": list(score), "prompts": list(prompts)}
        program = "from benchmarks.accuracy.worker import main; main()"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            self.execute(program, [str(out)], json.dumps({**request, "sampling": list(sampling)}))
            found = json.loads(out.read_text(encoding="utf-8"))
        return np.asarray(found["nll"], np.float64), found["outputs"]

    def execute(self, program: str, words: Sequence[str], stdin: str = "") -> None:
        """Run a Python program on the GPU.  Raises SlideSparseError with the end of its output if it fails."""
        defaults = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        own = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}
        own |= {"VLLM_CACHE_ROOT": str(self.cache.resolve())} if self.cache else {}
        process = subprocess.run(
            [sys.executable, "-c", program, *words],
            input=stdin,
            text=True,
            errors="replace",
            env={**defaults, **os.environ, **own, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if process.returncode:
            last = process.stdout[-LAST_CHARACTERS:].strip()
            raise SlideSparseError(f"{' '.join(words)} ended with {process.returncode}:\n{last}")


def write_own(model: Path, out: Path, samples: int, seed: int, engine: Engine) -> None:
    """Let a model write text, and save it as OUT.npy of ids [samples, WINDOW] for ``convert --calib``.

    Half of the samples continue a random token, half the point where the user's turn begins in the chat template.
    """
    tokenizer, generator = tokenizer_of(model), random.Random(seed)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    turn = tokenizer(chat[: chat.index(MARK)], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    plain = [token for token in range(len(tokenizer)) if token not in special]
    prompts = [turn if i % 2 else [generator.choice(plain)] for i in range(samples)]
    sampling = [{"max_tokens": WINDOW - len(ids), "temperature": 1.0, "ignore_eos": True} for ids in prompts]
    _, outputs = engine.run(model, prompts=prompts, sampling=sampling, seed=seed)
    ids = np.asarray([prompt + output for prompt, output in zip(prompts, outputs, strict=True)], np.int32)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.save(out, ids)
