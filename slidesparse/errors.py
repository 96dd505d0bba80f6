"""The exception hierarchy: every error that a user can act on, with its exit code.

Standard library only.  A message says what was found, what is allowed, and what to do.

    SlideSparseError       2   unusable input: options, checkpoints, patterns
      CalibrationError     2   data, models or options that calibration cannot use
      CheckFailed          1   a requested check failed
      EnvironmentFault     3   this machine lacks something: a library, a GPU, room on the disk
"""

from __future__ import annotations

import errno
import logging
import reprlib
import shlex
from collections.abc import Sequence
from functools import cache

from slidesparse.versions import VLLM_ON_GPUS

FAILED, USAGE, ENVIRONMENT, INTERRUPTED = 1, 2, 3, 130
LOGGER = "vllm.slidesparse"  # below vLLM's, so that its handlers and its level hold in a server
MAX_NAMES = 3  # names listed in a message or a line of a summary

INSTALL_CUDA = f"pip install vllm=={VLLM_ON_GPUS[-1]}"
INSTALL = f"{INSTALL_CUDA}; without an NVIDIA GPU, follow docs/install.md"
# of data, as options and messages name them
FORMS = (
    'FILE.jsonl, FILE.json or FILE.parquet (a "text", or chat "messages", a row), FILE.txt, FILE.npy (token ids), or '
    "the ORG/NAME of a dataset on the Hub; text also as .gz"
)


class SlideSparseError(Exception):
    """The base class of all errors that this package raises on purpose."""

    exit_code = USAGE


class CalibrationError(SlideSparseError, ValueError):
    """The data, the model or the options do not allow calibration."""


class CheckFailed(SlideSparseError):  # noqa: N818  a result, not an error
    """A requested check failed."""

    exit_code = FAILED


class EnvironmentFault(SlideSparseError):  # noqa: N818  EnvironmentError is a builtin
    """This machine lacks what the request needs: what was found, and the remedy, which the words may hold already."""

    exit_code = ENVIRONMENT

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what, self.remedy = what, remedy


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is full: that of the system, of Python or NumPy, or of PyTorch."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or type(error).__name__ == "OutOfMemoryError"  # of torch, for GPUs
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )


@cache  # models have many layers, and vLLM may load a plugin several times
def warn_once(message: str) -> None:
    """Log a warning, once per process, where a server's log has it."""
    logging.getLogger(LOGGER).warning("%s", message)


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message, on one line and with long values shortened."""
    return _SHOWN.repr(value)


def listed(names: Sequence[str]) -> str:
    """Return the first MAX_NAMES names, separated by commas, and whether there are more."""
    return f"{', '.join(names[:MAX_NAMES])}{', ...' if len(names) > MAX_NAMES else ''}"


def argument(path: object) -> str:
    """Return a path as an argument of a shell's command, which no command takes for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 100
_SHOWN.maxlevel = 3
