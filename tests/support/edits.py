"""Editing of converted checkpoints, and a check that vLLM refuses to serve one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from checkpoints import edit_block, rewrite
from engines import Engines, Request
from torch import Tensor

SPARSE_FLAGS = {"USE_CUSPARSELT": "1", "SPARSITY": "2_8"}


def edited(source: Path, out: Path, tensors: dict[str, Tensor | None], quantization: dict[str, Any]) -> str:
    """Copy ``source`` with tensors and entries of quantization_config replaced, or removed where None."""
    shutil.copytree(source, out)
    rewrite(out, **tensors)
    edit_block(out, **quantization)
    return str(out)


def refused(engines: Engines, model: str, env: dict[str, str], *fragments: str, **options: object) -> str:
    answer = engines.ask(Request(model, env=env, options=options))
    assert answer.error, "the model was served, a refusal was expected"
    message = answer.error + answer.log
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is missing from:\n{answer.error}\n{answer.log[-3000:]}"
    return answer.error
