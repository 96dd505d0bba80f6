"""Token ids of the texts on which models are scored and calibrated, and the engine that scores and continues them.

Three kinds of text, in windows of WINDOW tokens:

own         text that the model wrote itself, other samples than those that it is calibrated on
wikitext2   the validation text of WikiText-2, a file that the user gives
python      the reference of the Python language, which comes with every Python (`pydoc_data.topics`)
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slidesparse.errors import SlideSparseError
from slidesparse.evaluate import engine

WINDOW = 1024  # tokens
OWN, WIKITEXT, PYTHON = "own", "wikitext2", "python"
CACHE_BYTES = 3 << 30  # of an engine's keys and values
LAST_CHARACTERS = 4000  # of a program's output

Ids = list[int]


def windows(tokenizer: Any, text: str, count: int) -> list[Ids]:
    """Return the first windows of a text."""
    ids = tokenizer(text)["input_ids"]
    return [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(min(count, len(ids) // WINDOW))]


@dataclass(frozen=True)
class Engine:
    """How vLLM serves a model."""

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
        options = {"max_model_len": longest, "seed": seed, "enable_prefix_caching": False}
        # What others on the GPU take and free does not disturb an engine whose cache is given
        options |= {"kv_cache_memory_bytes": CACHE_BYTES, "gpu_memory_utilization": 0.1}
        # Logits of all tokens of a step are kept; to compile would take longer than to score
        options |= {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "enforce_eager": True}
        request = {"ids": list(score), "prompts": list(prompts), "sampling": list(sampling)}
        found = engine.run(model, request, options, environment=self._environment)
        lengths = [len(ids) - 1 for ids in score]
        parts = np.split(-found.logprobs.astype(np.float64), np.cumsum(lengths))[:-1]
        return np.asarray([part.mean() for part in parts]), found.outputs

    @property
    def _environment(self) -> dict[str, str]:
        """The variables that choose a GPU and a cache."""
        own = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}
        return own | ({"VLLM_CACHE_ROOT": str(self.cache.resolve())} if self.cache else {})

    def convert(self, words: Sequence[str]) -> str:
        """Run ``slidesparse convert`` on the GPU; return the end of its output.  Raises SlideSparseError."""
        process = subprocess.run(
            [sys.executable, "-m", "slidesparse.cli.main", "convert", *words],
            text=True,
            errors="replace",
            env={**os.environ, **self._environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        last = process.stdout[-LAST_CHARACTERS:].strip()
        if process.returncode:
            raise SlideSparseError(f"convert {' '.join(words)} ended with {process.returncode}:\n{last}")
        return last
