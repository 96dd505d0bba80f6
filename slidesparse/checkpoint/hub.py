"""Find models by their Hugging Face Hub id, such as ``org/name``, or the address of its page."""

from __future__ import annotations

import re
from pathlib import Path

from slidesparse.checkpoint.storage import SIDE_NAMES, SIDE_SUFFIXES, SUFFIX, CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(.*?)(?:/tree/main)?/?")


def local_folder(model: str) -> Path:
    """Return a model's folder: ``model`` itself if it exists, otherwise its copy in the Hub's cache.

    A missing copy is downloaded, but only files that a conversion reads or copies; with HF_HUB_OFFLINE=1 it must be
    there.  Raises CheckpointError for a model that is not available.
    """
    if not model:  # as from an unset variable of the shell
        raise CheckpointError("the model has no name: give a folder, or ORG/NAME of the Hub")
    folder, page = Path(model), _PAGE.fullmatch(model)
    if folder.exists():
        return folder
    if not _ID.fullmatch(page[1]) if page else "://" in model:  # a folder's name would lose a slash
        raise CheckpointError(
            f"{model} is not the page of a model; give https://huggingface.co/ORG/NAME, or ORG/NAME"
        )
    model = page[1] if page else model
    if not _ID.fullmatch(model):
        return folder
    from huggingface_hub import snapshot_download

    kinds = [f"*{suffix}" for suffix in (SUFFIX, *SIDE_SUFFIXES)] + [f"{name}*" for name in SIDE_NAMES]
    try:
        return Path(snapshot_download(model, allow_patterns=kinds, ignore_patterns=["consolidated*"]))
    except Exception as error:  # raised by the library, its HTTP client or the file system
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{model} is not a folder here, and the Hugging Face Hub does not provide it ({type(error).__name__}: "
            f"{reason}); give a folder, or for a model that needs permission: hf auth login"
        ) from error
