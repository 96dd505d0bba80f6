"""Ask vLLM, where it is installed, what it would make of every layer of a checkpoint, without loading its weights.

One function answers for `slidesparse convert`, before it writes anything, for `slidesparse doctor`, and by being the
server's own code for the server.  It builds the model in a process of its own (`slidesparse.vllm_patch.skeleton`), in
10 to 20 seconds, which is mostly vLLM's import.

How stock vLLM 0.25.1 to 0.32 decides which layers a compressed-tensors ``quantization_config`` quantizes:

- A layer has a name, the ``prefix`` that vLLM's class of the model gives it.  That is usually, not always, the name in
  the checkpoint: Falcon-H1 calls ``model.layers.0.mamba.in_proj`` ``model.2.mixer.in_proj``.
- Before they are compared, entries of ``targets`` and ``ignore`` that are names are renamed by the class's
  ``hf_to_vllm_mapper``; classes such as Linear and ``re:`` regexes (matched from the start) are not.
- A fused layer (``qkv_proj``, by the class's ``packed_modules_mapping``) also has the names of its parts.
- It is ignored if ``ignore`` has its name, or those of all its parts; those of some are an error.
- It is quantized if a target is its name, or targets are the names of all its parts, or a target is contained in the
  name of its class, as Linear is in every linear layer's.  Else it is not, without a word.

So Linear with a list of layers to ignore quantizes a layer that vLLM calls by another name, casting its float weights
to INT8.  Targets by name leave such a layer unquantized, and loading its ``weight_scale`` fails.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slidesparse.checkpoint.storage import CONFIG, SUFFIX, Checkpoint, TensorSpec
from slidesparse.errors import ENVIRONMENT, FAILED, CheckFailed
from slidesparse.flags import DISABLE, MODE, REQUESTS
from slidesparse.resolve import Resolution

PROGRAM = "slidesparse.vllm_patch.skeleton"
ERROR_LINE = re.compile(r"\b\w+(?:Error|Exception): |^(?:\w+\.)+error: ")  # such as regex's
BARE_ERROR = re.compile(r"(?:^|\] )[\w.]+(?:Error|Exception)$")  # without a message; code is above
CONTINUED_ERROR = re.compile(r"ValidationError: \d+ ")  # of pydantic; field and reason follow
MAX_LINES, MAX_CHARACTERS = 5, 500  # lines of the log in an error message, and characters of each


class NotServedError(CheckFailed):
    """The server would not serve the checkpoint, for the reason that the message gives in the server's own words."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # ENVIRONMENT where the machine lacks something


@dataclass(frozen=True)
class ServedLayer:
    """A linear layer of vLLM."""

    name: str  # as vLLM calls it, by which targets and ignore find it
    rows: int  # N
    columns: int  # K
    quantized: bool
    reason: str  # why SlideSparse does not serve it, as in the log; "" if it does
    weights: list[str]  # checkpoint's names of those it is made of, such as q, k, v, without ``.weight``


@dataclass(frozen=True)
class Serving:
    """A checkpoint as the server takes it."""

    layers: tuple[ServedLayer, ...]
    left: Mapping[str, str]  # layer that vLLM's own kernels serve, also of experts -> reason, as in the log
    resolution: Resolution | None  # None if the plugin does not serve the checkpoint

    @property
    def quantized(self) -> set[str]:
        """The weights, by the checkpoint's names, of the layers that it quantizes."""
        return {name for layer in self.layers if layer.quantized for name in layer.weights}


def is_available() -> bool:
    """Return whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


class Skeletons:
    """Builds models without weights in vLLM, which it imports once, in 10 seconds; then each takes about one.

    A context manager; vLLM must be installed.
    """

    def __enter__(self) -> Skeletons:
        self._place = tempfile.TemporaryDirectory()
        self._log = Path(self._place.name) / "log"
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM],
                env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},  # CUDA does not work after a fork
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._place.cleanup()

    def layers(
        self,
        folder: Path,
        tensors: Iterable[TensorSpec],
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Serving:
        """Return what vLLM would make of a checkpoint under the current flags.

        Args:
            folder: a checkpoint, or the source of a planned one, whose tokenizer and other files are used.
            tensors: the tensors of the checkpoint, or of the planned one, as its files hold them; see `stored`.
            config: the config.json of a planned checkpoint.  Where and with which flags it will be served is not
                known: parts of the model that do not run on this machine, such as attention, do not matter then.
            options: arguments of ``vllm serve``.

        Raises NotServedError with the reason if the server would refuse it.
        """
        with tempfile.TemporaryDirectory(dir=self._place.name) as place:
            answer, log = Path(place) / "answer", Path(place) / "log"
            if config is not None:
                folder = _planned(folder, config, Path(place) / "planned")
            flags = () if config is None else (MODE, DISABLE, *REQUESTS)
            environ = {name: value for name, value in os.environ.items() if name not in flags}
            request = {
                "folder": str(folder),
                "tensors": {spec.name: (spec.dtype, spec.shape) for spec in tensors},
                "options": options,
                "plan": config is not None,
                "answer": str(answer),
                "log": str(log),
                "environ": {"VLLM_NO_USAGE_STATS": "1", **environ, "HF_HUB_OFFLINE": "1"},
            }
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # vLLM could not be imported
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            for line in self._process.stdout:
                if line == b"ended\n":  # others are what vLLM prints
                    break
            found = json.loads(answer.read_bytes()) if answer.is_file() else {}
            if "error" in found:
                raise NotServedError(found["error"], ENVIRONMENT if found["code"] == ENVIRONMENT else FAILED)
            if not found:
                text = (log if log.is_file() else self._log).read_text(errors="replace")
                raise NotServedError(f"vLLM does not serve it here:\n{find_errors(text)}")
        resolution = found["resolution"] and Resolution(**found["resolution"])
        return Serving(tuple(ServedLayer(**layer) for layer in found["layers"]), found["left"], resolution)


def stored(checkpoint: Checkpoint) -> list[TensorSpec]:
    """Return the tensors of a checkpoint as its files hold them: a packed weight is several."""
    return [part.spec for tensor in checkpoint.tensors.values() for part in (tensor.parts or (tensor,))]


def _planned(source: Path, config: Mapping[str, Any], folder: Path) -> Path:
    """Make a folder of the source's files, without weights, and a config.json."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name != CONFIG and path.suffix != SUFFIX and path.is_file():
            (folder / path.name).symlink_to(path.resolve())
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder


def find_errors(log: str) -> str:
    """Return the errors raised in vLLM's log, those without a message with their code, or else its last lines.

    Long lines are shortened.
    """
    lines = log.splitlines()
    raised = []
    for i, line in enumerate(lines):
        if BARE_ERROR.search(line):
            above = (other.rpartition("    ")[2].strip(" ^~") for other in reversed(lines[:i]))
            raised.append(": ".join([line, *filter(None, above)][:2]))
        elif ERROR_LINE.search(line) and "WARNING" not in line:
            raised.append(line)
            if CONTINUED_ERROR.search(line):
                raised += [line for line in lines[i + 1 : i + 3] if "For further information" not in line]
    found = raised[:MAX_LINES] or lines[-MAX_LINES:]
    return "\n".join(line[:MAX_CHARACTERS] + " ..." * (len(line) > MAX_CHARACTERS) for line in found)
