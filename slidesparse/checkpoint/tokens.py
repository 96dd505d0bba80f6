"""Read texts and token ids, and open the tokenizer of a checkpoint, for calibration and evaluation."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from string import ascii_letters
from typing import Any, NamedTuple

import numpy as np

from slidesparse.checkpoint.storage import CheckpointError, parse_json
from slidesparse.errors import FORMS, SlideSparseError, shown

TOKENIZER = "tokenizer.json"
PACKED = b"\x1f\x8b"  # begins a file of gzip; downloads may be unpacked on the way, and keep the name
INSTEAD = ", or give token ids instead of texts: ids.npy"
MAX_IDS = 2**28  # ids in a file, 2 GiB
# Keys of a document, as a text or as the turns of a conversation and the tools that its template describes
TEXT, MESSAGES, TOOLS = "text", "messages", "tools"
TURNS = "conversations"  # instead of messages, as ShareGPT has them: {"from": "human", "value": "..."}
SPEAKERS = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")}
SPEAKERS |= {role: role for role in ("system", "user", "assistant", "tool")}
DAY = datetime(2025, 7, 1)
SPLIT = "train"  # of a dataset on the Hub
BUFFER = 1000  # of its documents, from which the next one is drawn
BATCH = 2**20  # characters that are encoded together, in 200 times the memory
_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/(.+?)(?:/viewer|/tree/main)?/?"
)


class Conversation(NamedTuple):
    """The messages of a conversation, and the tools that the model may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


Document = str | Conversation
Encode = Callable[[list[str], bool], list[list[int]]]


def read_text(path: Path) -> str:
    """Read a file in UTF-8, without a byte order mark; one packed by gzip is unpacked, whatever its name.

    Raises SlideSparseError for another encoding or a damaged archive.
    """
    try:
        with path.open("rb") as file:
            is_packed = file.read(len(PACKED)) == PACKED
        with (gzip.open if is_packed else open)(path, "rt", encoding="utf-8-sig") as text:
            return text.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as reason:
        raise SlideSparseError(f"{path} cannot be unpacked ({reason}); fetch it again") from reason
    except UnicodeDecodeError as reason:
        raise SlideSparseError(
            f"{path} is not text in UTF-8 ({reason}); convert it: iconv -f ENCODING -t utf-8"
        ) from reason


def read_documents(data: str) -> Iterator[Document | None]:
    """Yield the documents of a file in one of the `FORMS` but .npy, or of a dataset on the Hub; None for an empty row.

    A line of a .jsonl file is a string, or an object with "text", or with "messages" and perhaps "tools", as OpenAI has
    them, or with "conversations", as ShareGPT has them; the first of these that is not empty counts.  A .json file
    holds such lines, or one list of such rows.  A .txt file is one document.  Raises SlideSparseError, with the line
    number, for anything else.
    """
    path = Path(data)
    suffix = form(data) if path.is_file() else ""
    if suffix == ".txt":
        yield from [text] if (text := read_text(path)).strip() else []
    elif suffix in (".json", ".jsonl"):
        text = read_text(path)
        if suffix == ".json" and text.lstrip().startswith("["):
            for number, row in enumerate(_list(text, path), 1):
                yield _document(row, f"{path}, row {number}")
            return
        # JSON strings may contain U+2028 and the like, so that lines end at line feeds only
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield _document(line, f"{path}, line {number}", is_json=True)
    elif suffix == ".parquet":
        for number, row in enumerate(_parquet_rows(path), 1):
            yield _document(_filled(row), f"{path}, row {number}")
    elif is_dataset(data):
        for number, row in enumerate(_hub_rows(_name(data)), 1):
            yield _document(_filled(row), f"{data}, row {number}")
    else:
        problem = "is not a supported type of file" if path.is_file() else "is not a file"
        raise SlideSparseError(f"{shown(data)} {problem}; give {FORMS}")


def form(data: str) -> str:
    """Return the suffix that tells the form of a file, such as ".jsonl", in lower case and without ".gz"."""
    return Path(data.lower().removesuffix(".gz")).suffix


def is_dataset(data: str) -> bool:
    """Return whether ``data`` is the ORG/NAME of a dataset on the Hub, or its page, not a file that is missing."""
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", _name(data)) and not re.search(r"\.[a-z]{2,}\d*$", data)
    return bool(is_name) and not Path(data).exists()


def _name(data: str) -> str:
    """Return the ORG/NAME of a dataset given by the address of its page; anything else as it is."""
    page = _PAGE.fullmatch(data)
    return page[1] if page else data


def _list(text: str, path: Path) -> list[Any]:
    try:
        return json.loads(text)  # type: ignore[no-any-return]
    except (ValueError, RecursionError) as reason:
        raise SlideSparseError(f"{path} is no JSON: {reason}; fetch it again") from reason


def _document(value: Any, where: str, is_json: bool = False) -> Document | None:
    """Return the document in a row, or None if it is empty."""
    try:
        value = json.loads(value) if is_json else value
        value = {TEXT: value} if isinstance(value, str) else value
        if not isinstance(value, dict) or not {TEXT, MESSAGES, TURNS} & value.keys():
            raise ValueError(f"found {shown(list(value) if isinstance(value, dict) else value)}")
        messages, text = value.get(MESSAGES) or value.get(TURNS), value.get(TEXT)
        if isinstance(messages, list) and messages and not text:
            tools = value.get(TOOLS) or None  # in Parquet often as text, which may be empty
            chat = Conversation(
                [*map(_message, messages)], json.loads(tools) if isinstance(tools, str) else tools
            )
            json.dumps(chat, ensure_ascii=False, default=str).encode()
            return chat
        text = "" if not messages and text is None else text  # as of rows that a dataset lacks
        if not isinstance(text, str):
            raise TypeError(f"found {shown(messages if text is None else text)}")
        text.encode()  # half of a surrogate pair is no text for tokenizers
        return text if text.strip() else None
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as reason:
        problem = f"{reason} is missing" if isinstance(reason, KeyError) else reason
        raise SlideSparseError(
            f'{where} ({problem}): give {{"text": "..."}}, '
            '{"messages": [{"role": "user", "content": "..."}, ...]} or a string'
        ) from reason


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the keys of objects in it, however deep, that Parquet has because other rows have them."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _message(message: Any) -> dict[str, Any]:
    """Return a message as vLLM's server gives it to chat templates.

    Its content is a text: the parts of one are joined, and a call of tools may lack it.  The arguments of a call are no
    JSON but objects.  Keys without a value are left out.
    """
    if not isinstance(message, dict):  # such as a map of Parquet, which is a list of pairs
        raise TypeError(f"found {shown(message)}, no object, as a message")
    if "from" in message and "role" not in message:
        if (speaker := message["from"]) not in SPEAKERS:
            raise ValueError(f"found a turn from {shown(speaker)}, not from {', '.join(SPEAKERS)}")
        return _message({"role": SPEAKERS[speaker], "content": message["value"]})
    role, content = message["role"], message.get("content")
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        function = call["function"]
        if isinstance(arguments := function.get("arguments"), str):
            call["function"] = {**function, "arguments": json.loads(arguments or "{}")}
    if isinstance(content, list) and all(part["type"] == TEXT for part in content):
        content = "\n".join(part[TEXT] for part in content)
    content = "" if content is None and calls else content
    if not isinstance(role, str) or not isinstance(content, str):
        raise TypeError(f"{shown(message)} has no text as its content")
    known = {key: item for key, item in message.items() if item is not None}
    return {**known, "content": content, **({"tool_calls": calls} if calls else {})}


def _parquet_rows(path: Path) -> list[Any]:
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        file = ParquetFile(path)
        names = file.schema_arrow.names
        if not {TEXT, MESSAGES, TURNS} & {*names}:
            return [dict.fromkeys(names)]  # a row that is refused by its keys
        # other columns may be large, or of types that Python lacks
        return list(file.read([TEXT, MESSAGES, TURNS, TOOLS]).to_pylist())
    except Exception as error:  # of the library
        raise SlideSparseError(
            f"{path} cannot be read as Parquet: {' '.join(str(error).split())[:300]}"
        ) from error


def _hub_rows(name: str) -> Iterator[Any]:
    """Yield the rows of a dataset in a random order, the same in every run, and no more than are asked for."""
    from datasets import load_dataset  # type: ignore[import-not-found]

    try:
        yield from load_dataset(name, split=SPLIT, streaming=True).shuffle(seed=0, buffer_size=BUFFER)
    except Exception as error:  # of the library or its HTTP client
        reason = " ".join(str(error).split())[:300]
        raise SlideSparseError(
            f"{name} is neither a file here nor a dataset that the Hub provides ({type(error).__name__}: {reason}); "
            f"give {FORMS}"
        ) from error


def read_ids(path: Path) -> np.ndarray:
    """Read the token ids of a ``.npy`` file, [samples, tokens] or one stream [tokens].

    Raises SlideSparseError, which names dtype and shape, for anything else.
    """
    if not path.is_file():
        raise SlideSparseError(f"{str(path)!r} is not a file; give {FORMS}")
    try:
        with np.errstate(over="ignore"):  # sizes of a damaged header
            ids = np.lib.format.open_memmap(path, mode="r")
    except Exception as reason:  # of many classes, for a damaged header
        raise SlideSparseError(f"{path} is not an array of numbers that NumPy wrote: {reason}") from reason
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or ids.size > MAX_IDS:
        raise SlideSparseError(
            f"{path} holds {ids.dtype} {list(ids.shape)}; token ids are integers [samples, tokens] or [tokens], at "
            f"most {MAX_IDS}"
        )
    return np.array(ids)


def read_samples(path: Path, length: int) -> list[np.ndarray]:
    """Read the samples of a ``.npy`` file: its stream, or each row, cut into samples; shorter rows are one each."""
    ids = read_ids(path)
    if ids.ndim == 1:
        return cut(ids, length)
    if ids.shape[1] > length:
        return [sample for row in ids for sample in cut(row, length)]
    return list(ids) if ids.shape[1] > 1 else []


def cut(stream: np.ndarray, length: int) -> list[np.ndarray]:
    """Cut a stream of ids [tokens] into consecutive samples of ``length``, without the rest."""
    return list(stream[: len(stream) // length * length].reshape(-1, length))


def cut_stream(documents: Iterable[list[int]], length: int, most: int | None) -> list[np.ndarray]:
    """Join the ids of documents, which may have no end, and `cut` them into ``most`` samples, reading no more."""
    parts, tokens = [np.empty(0, np.int64)], 0
    for ids in documents:
        parts.append(np.asarray(ids, dtype=np.int64))
        tokens += len(ids)
        if most is not None and tokens >= most * length:
            break
    return cut(np.concatenate(parts), length)[:most]


def require_ids(
    samples: Sequence[Sequence[int] | np.ndarray], vocabulary: int, data: str, folder: Path
) -> None:
    """Raise SlideSparseError if ``samples``, read from ``data``, have ids outside the vocabulary of ``folder``."""
    low = min(int(np.min(sample)) for sample in samples)
    high = max(int(np.max(sample)) for sample in samples)
    if not 0 <= low <= high < vocabulary:
        raise SlideSparseError(
            f"{data} holds token ids from {low} to {high}, but the vocabulary of {folder} has {vocabulary} tokens, "
            f"0 to {vocabulary - 1}; use the tokenizer that belongs to these weights"
        )


def tokenize(folder: Path, documents: Iterable[Document]) -> Iterator[list[int]]:
    """Yield the ids of documents by the checkpoint's tokenizer, including special tokens.

    Documents are read in batches of BATCH characters, which the tokenizers library encodes on all cores.  Messages are
    formatted by the tokenizer's chat template.  Raises SlideSparseError for a folder without a readable tokenizer, or
    without a template where it is needed.
    """
    encode, open_chat = None, cache(automatic_tokenizer)
    for batch in _batches(documents):
        encode = encode or _encoder(folder)
        # the template holds the special tokens
        for is_text, group in groupby(batch, lambda document: isinstance(document, str)):
            yield from encode([_text(document, folder, open_chat) for document in group], is_text)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents in lists of at least BATCH characters, but for the last one."""
    batch, size = list[Document](), 0
    for document in documents:
        batch.append(document)
        size += len(str(document))
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoder(folder: Path) -> Encode:
    """Return a function from texts, and whether special tokens are added, to the ids of each."""
    _require_files(folder)
    if not (folder / TOKENIZER).is_file():
        slow = automatic_tokenizer(folder)
        return lambda texts, special: list(slow(texts, add_special_tokens=special)["input_ids"])
    fast = _fast(folder, INSTEAD)
    fast.no_padding()
    fast.no_truncation()
    return lambda texts, special: [x.ids for x in fast.encode_batch(texts, add_special_tokens=special)]


def _fast(folder: Path, instead: str = "") -> Any:
    """Return the tokenizer of TOKENIZER.  Raises SlideSparseError, which ends with ``instead``, if it is unreadable."""
    from tokenizers import Tokenizer

    try:
        # from_file takes names in UTF-8 alone
        return Tokenizer.from_buffer((folder / TOKENIZER).read_bytes())
    except Exception as error:  # the library raises plain Exception
        raise _unreadable(folder, error, instead) from error


def require_readable(folder: Path) -> None:
    """Raise SlideSparseError for a file of a tokenizer that no library can read, such as one that is truncated.

    Of other files it depends on the model, and on code that may be trusted, which of them is read.
    """
    for path in (folder / TOKENIZER, folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        if not os.path.lexists(path):
            continue
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file, or a link to none; fetch it again")
        if path.name == TOKENIZER:
            _fast(folder)
        else:
            parse_json(path.read_bytes(), path)


def _text(document: Document, folder: Path, open_chat: Callable[[Path], Any]) -> str:
    """Return a document as text."""
    if isinstance(document, str):
        return document
    chat = open_chat(folder)
    try:
        text = templated(chat, document.messages, document.tools)
    except Exception as error:  # of Jinja, or of the template
        reason = " ".join(str(error).split())
        raise SlideSparseError(
            f"the tokenizer of {folder} has no chat template for these messages ({reason}), which begin with "
            f"{shown(document.messages[0])}; give texts instead"
        ) from error
    return text


def templated(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    """Return a conversation as text by a tokenizer's chat template.

    The date that a template prints, as those of Llama do, is DAY, so that data are the same on the next day, when a run
    is resumed.
    """
    options: dict[str, Any] = {"tools": tools, "tokenize": False}
    with suppress(NotImplementedError):  # of Mistral's own tokenizers, which have no template
        options["chat_template"] = _on_that_day() + tokenizer.get_chat_template(tools=tools)
    text: str = tokenizer.apply_chat_template(messages, **options)
    return text


@cache
def _on_that_day() -> str:
    """Return the beginning of a template in which DAY replaces today in transformers' function for templates."""
    codes = (f"%{flag}{letter}" for flag in ("", "-") for letter in ascii_letters)
    steps = "".join(f" | map('replace', {code!r}, {DAY.strftime(code)!r})" for code in codes)
    parts = f"format.split('%%'){steps} | join('%')"
    return f"{{% macro strftime_now(format) %}}{{{{ {parts} }}}}{{% endmacro %}}{{{{ '' }}}}"


def automatic_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a checkpoint.  Raises SlideSparseError if there is none that can be read."""
    from transformers import AutoTokenizer

    _require_files(folder)  # without any, it might return one without tokens
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any kind, for files that are not as the library expects
        raise _unreadable(folder, error, INSTEAD) from error


def has_tokenizer(folder: Path) -> bool:
    """Return whether a checkpoint has files of a tokenizer."""
    return any(path.is_file() for kind in ("tokenizer*", "vocab*") for path in folder.glob(kind))


def _require_files(folder: Path) -> None:
    if not has_tokenizer(folder):
        raise SlideSparseError(
            f"{folder} has no tokenizer ({TOKENIZER}), which texts need; fetch it{INSTEAD}"
        )


def _unreadable(folder: Path, error: Exception, instead: str) -> SlideSparseError:
    return SlideSparseError(f"the tokenizer of {folder} cannot be read ({error}); fetch it again{instead}")
