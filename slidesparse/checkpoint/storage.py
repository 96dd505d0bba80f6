"""Safetensors checkpoints, read and written in chunks of rows, and validated when opened.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes::

    | n | {"name": {"dtype": "BF16", "shape": [N, K], "data_offsets": [begin, end]}, ...} | bytes ... |

The safetensors library validates each file when it is opened.  Rows are read with pread instead of its memory map, so
that a file truncated later raises an exception instead of a bus error.

A weight without its zeros (`slidesparse.bitmask`) is stored as several tensors, and presented as one dense tensor::

    X.weight [N, K]  <-  X.shape [2, 1], X.compressed [N, V], X.bitmask [N, ceil(K / 8)]
                         X.shape [2], X.compressed, flat, X.bitmask [N, ceil(K / 8)], X.row_offsets [N]
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slidesparse.bitmask import BYTE, decompress
from slidesparse.errors import SlideSparseError, listed, shown
from slidesparse.slide import row_chunks

CONFIG = "config.json"
TEXT_CONFIG = "text_config"  # key of the language model's config in that of a multimodal model
QUANTIZATION = ("quantization_config", "compression_config")  # keys of the quantization, the usual one first
INDEX = "model.safetensors.index.json"
MODULES = "modules.json"  # file of sentence-transformers, which embed texts
SUFFIX = ".safetensors"
ADAPTER_CONFIG = "adapter_config.json"  # beside it transformers loads the model that it names
_ADAPTER = "adapter"  # beginning of the names of an adapter's weights, in peft and MLX
MODEL = "model.safetensors"  # the whole model if there is no index, whatever other files exist
# Files of a folder without a readable model -> what to do
_INSTEAD = {
    ADAPTER_CONFIG: "it is a LoRA adapter: convert its base model and serve the adapter with that, or merge it "
    "into the base model first",
    "snapshots": "it is a model's folder in the Hub's cache: give ORG/NAME, or the folder of a revision in it",
    "params.json": "it is in the format of Mistral or Meta: fetch the files for transformers too",
    "*.gguf": "it is in the format of llama.cpp: fetch the original model",
    **dict.fromkeys(("*.bin", "*.pt", "*.pth"), "save the model again with transformers, as safetensors"),
}
# Files beside config.json by which other tools say that they quantized the weights -> quant_method
_QUANTIZED_BY = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
# Files of a checkpoint other than the weights: tokenizers, configurations, chat templates, licences
SIDE_SUFFIXES = (".json", ".jinja", ".txt", ".md", ".model", ".bpe", ".codes", ".tiktoken", ".spm")
SIDE_NAMES = ("tokenizer.model", "LICENSE", "LICENCE", "COPYING", "NOTICE", "README", "USE_POLICY")
JSON_LIMIT = 64 * 2**20  # bytes of a configuration or an index, which rarely exceed some megabytes
MAX_SIZE = 2**40  # of a tensor's dimensions
MAX_ROW_BYTES = 2**31  # a row is read at once; joined experts have some 2^28
GLANCE = 1024  # bytes from the start of each tensor that a fingerprint depends on
MAX_NAME, MAX_FILE_NAME = 1100, 255  # characters of a tensor's name; bytes of a file's

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("F32", "F16", "BF16")  # dtypes that are quantized
SCALES = (*FLOATS, "F8_E8M0")  # of scales of blocks, which may be powers of two

COMPRESSED, BITMASK, SHAPE = ".compressed", ".bitmask", ".shape"  # suffixes for a weight without its zeros
ROW_OFFSETS = ".row_offsets"  # suffix for the starts of the rows in flat values


class CheckpointError(SlideSparseError, ValueError):
    """A checkpoint, or an option for one, cannot be used."""


class TensorSpec(NamedTuple):
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The size of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """The product of the sizes of the other dimensions."""
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.columns * DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.rows * self.row_bytes

    def chunks(self) -> Iterator[slice]:
        """Yield the rows of chunks, see `row_chunks`, which depend on the shape alone."""
        return row_chunks(self.rows, self.columns)


class StoredTensor(NamedTuple):
    """A tensor in a file: its spec, the file's name and the position of its first byte."""

    spec: TensorSpec
    file: str
    start: int
    parts: tuple[StoredTensor, ...] = ()  # of a weight without its zeros: values, bitmask, shape, row offsets

    @property
    def nbytes(self) -> int:
        """The bytes that are stored."""
        return sum(part.nbytes for part in self.parts) if self.parts else self.spec.nbytes


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint folder with consistent headers, index and file sizes."""

    folder: Path
    config: Mapping[str, Any]
    index: Mapping[str, Any] | None
    files: tuple[str, ...]
    tensors: Mapping[str, StoredTensor]
    # file -> what `_state` says of it
    opened: Mapping[str, tuple[int, ...]] = field(default_factory=dict, kw_only=True)

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read config, index and all headers.  Raises CheckpointError for a missing, damaged or inconsistent file."""
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a folder; give a Hugging Face checkpoint folder with {CONFIG}, or ORG/NAME of the Hub"
            )
        config = _read_object(folder, CONFIG, "the model's configuration")
        index = _read_object(folder, INDEX, "the index of shards") if (folder / INDEX).exists() else None
        files = _single_file(folder) if index is None else _indexed_files(folder, index)
        for file in files:
            _require_file(folder, file)
        opened = {file: _state(folder / file) for file in (CONFIG, *files)}
        places = (index or {}).get("weight_map", {})
        tensors: dict[str, StoredTensor] = {}
        for tensor in (tensor for file in files for tensor in read_header(folder / file)):
            name, file = tensor.spec.name, tensor.file
            if places.get(name, file) != file:
                continue  # a stale copy
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name} is in {tensors[name].file} and in {file} of {folder}, and no index says which "
                    "counts; remove one of them"
                )
            tensors[name] = tensor
        for name, file in places.items():
            if name not in tensors:
                raise CheckpointError(
                    f"{folder / INDEX} places tensor {shown(name)} in {file}, which does not hold it; "
                    "the index belongs to other files: fetch the checkpoint again"
                )
        checkpoint = cls(folder, config, index, tuple(files), tensors, opened=opened)
        with checkpoint.reader() as reader:
            return replace(checkpoint, tensors=_joined(checkpoint, reader))

    @property
    def fingerprint(self) -> str:
        """A key for what is cached of a model: names, sizes and times of its files, and a glance at each tensor.

        Where all files have one time, as in images of containers, weights alone tell finetuned models apart.
        """
        digest = hashlib.sha256(repr([(file, *state[1:]) for file, state in self.opened.items()]).encode())
        with self.reader() as reader:
            for place in sorted({(tensor.file, tensor.start) for tensor in self.tensors.values()}):
                digest.update(reader.glance(*place))
        return digest.hexdigest()

    def quantization_config(self) -> dict[str, Any] | None:
        """Return ``quantization_config`` of config.json, or its older form ``compression_config``, or None.

        As in vLLM, a multimodal model may hold it in the ``text_config`` of its language model.
        The name of its method is spelled as vLLM spells it.  Of a tool that keeps its configuration in a file of its
        own only the name is returned, as ``quant_method``: no such checkpoint can be read.
        """
        configs = (self.config, text_config(self.config))
        blocks = [config[key] for config in configs for key in QUANTIZATION if config.get(key)]
        tools = [tool for file, tool in _QUANTIZED_BY.items() if (self.folder / file).is_file()]
        block = next(iter([*blocks, *({"quant_method": tool} for tool in tools)]), None)
        if block is not None and not isinstance(block, dict):
            raise CheckpointError(
                f"quantization_config of {self.folder / CONFIG} must be an object, found {shown(block)}"
            )
        if block and isinstance(method := block.get("quant_method"), str):
            spelled = method.lower().replace("compressed_tensors", "compressed-tensors")
            return {**block, "quant_method": spelled}
        return block

    def require(self, name: str) -> TensorSpec:
        """Return a tensor's spec.  Raises CheckpointError if the checkpoint does not have it."""
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.folder} has no tensor {name}, which its layers need; fetch or convert it again"
            )
        return self.tensors[name].spec

    def require_unchanged(self) -> None:
        """Raise CheckpointError if a file was written or replaced since the checkpoint was opened."""
        for file, state in self.opened.items():
            path = self.folder / file
            if not path.exists() or _state(path) != state:
                raise CheckpointError(f"{path} was changed while it was read; convert again once it is whole")

    def reader(self) -> Reader:
        """Return a context manager for reading tensors; `Reader.rows` may be called from several threads."""
        return Reader(self)


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_embedding_model(folder: Path) -> bool:
    """Return whether sentence-transformers embeds texts with a model: its last hidden states are then its output."""
    return (folder / MODULES).exists()


def is_pickled(folder: Path) -> bool:
    """Return whether a model's only weights are in files that PyTorch pickled."""
    return not any(folder.glob(f"*{SUFFIX}")) and any(folder.glob("*.bin")) and (folder / CONFIG).is_file()


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model, which in a multimodal model's config is a part."""
    text = config.get(TEXT_CONFIG)
    return text if isinstance(text, dict) else config


def unquantized_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model, and in it that of its language model, without their quantization."""
    kept = {key: value for key, value in config.items() if key not in QUANTIZATION}
    if isinstance(text := kept.get(TEXT_CONFIG), Mapping):
        kept[TEXT_CONFIG] = {key: value for key, value in text.items() if key not in QUANTIZATION}
    return kept


def _joined(checkpoint: Checkpoint, reader: Reader) -> dict[str, StoredTensor]:
    """Return the tensors, with weights instead of their parts.  Raises CheckpointError for inconsistent parts."""
    tensors, weights, part_names = checkpoint.tensors, {}, set()
    for name in tensors:
        layer = name.removesuffix(COMPRESSED)
        if layer == name:
            continue
        needed = [checkpoint.require(layer + suffix).name for suffix in (BITMASK, SHAPE)]
        needed += [layer + ROW_OFFSETS] if layer + ROW_OFFSETS in tensors else []
        values, bitmask, shape, *offsets = parts = [tensors[part] for part in (name, *needed)]
        small = shape.spec.dtype == "I64" and shape.spec.nbytes == 2 * 8
        n, k = reader.whole(shape.spec.name).flatten().tolist() if small else (-1, -1)
        flat = len(values.spec.shape) == 1
        fits = (
            [part.spec[1:] == ("I64", (n,)) for part in offsets] == [True] if flat else values.spec.rows == n
        )
        if bitmask.spec[1:] != ("U8", (n, -(-k // BYTE))) or not fits or k < 0:
            stored = ", ".join(
                f"{part.spec.name} {part.spec.dtype} {list(part.spec.shape)}" for part in parts
            )
            raise CheckpointError(
                f"{checkpoint.folder} stores a weight of {n} x {k} as {stored}, whose shapes or dtypes are "
                "inconsistent; fetch or convert it again"
            )
        weight = f"{layer}.weight"
        if weight in tensors:
            raise CheckpointError(f"{checkpoint.folder} holds both {weight} and {name}; remove one of them")
        spec = TensorSpec(weight, values.spec.dtype, (n, k))
        weights[name] = StoredTensor(spec, values.file, values.start, tuple(parts))
        part_names.update(needed)
    merged = (weights.get(name, tensors[name]) for name in tensors if name not in part_names)
    return {stored.spec.name: stored for stored in merged}


def parse_json(text: bytes, label: object) -> dict[str, Any]:
    """Parse ``text`` as a JSON object.  Raises CheckpointError, in which ``label`` names it, for anything else."""
    try:
        value = json.loads(text.decode())  # in UTF-8, as transformers and vLLM read it
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{label} is not JSON: {reason}; fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{label} must hold an object, found {shown(value)}; fetch it again")
    return value


def _read_object(folder: Path, file: str, description: str) -> dict[str, Any]:
    path = folder / file
    if not path.exists():
        raise CheckpointError(
            f"{path} ({description}) is missing{_instead(folder)}; give a Hugging Face checkpoint folder"
        )
    _require_file(folder, file)
    size = path.stat().st_size
    if size > JSON_LIMIT:
        raise CheckpointError(
            f"{path} ({description}) is {size} bytes, at most {JSON_LIMIT} are read; fetch it again"
        )
    return parse_json(path.read_bytes(), f"{path} ({description})")


def _require_file(folder: Path, file: str) -> None:
    """Raise CheckpointError unless ``file`` is a regular file inside the folder."""
    path = folder / file
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; fetch it again")
    if not is_inside(folder, path):
        raise CheckpointError(
            f"{path} is a link out of its folder, to {path.resolve()}; only files in the folder are read: give the "
            "folder that holds the files, or copy them"
        )


def is_inside(folder: Path, path: Path) -> bool:
    """Return whether a path, after following links, is in ``folder`` or in the blobs of its Hub cache.

    Such a cache links from ``models--org--name/snapshots/REVISION`` to ``models--org--name/blobs``, and possibly from
    there to ``blobs`` of the whole cache.
    """
    try:
        real, root = path.resolve(strict=True), folder.resolve()
    except (OSError, RuntimeError):  # a dangling or circular link
        return False
    roots = [root]
    for ancestor in root.parents:
        if ancestor.name == "snapshots" and ancestor.parent.name.startswith("models--"):
            roots += [ancestor.parent / "blobs", ancestor.parent.parent / "blobs"]
    return any(real.is_relative_to(root) for root in roots)


def _single_file(folder: Path) -> list[str]:
    files = sorted(path.name for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith(_ADAPTER))
    if len(files) == 1 or MODEL in files:
        return [MODEL] if MODEL in files else files
    if files:
        raise CheckpointError(
            f"{folder} holds {len(files)} {SUFFIX} files ({files[0]}, ...) and no {INDEX}, which says "
            "which of them make up the model; fetch the index too, or remove the files of other models"
        )
    raise CheckpointError(f"{folder} holds no {SUFFIX} file of a whole model{_instead(folder)}")


def _instead(folder: Path) -> str:
    """Return, in parentheses, a file that explains why a folder holds no readable model, and what to do; or ""."""
    matches = ((sorted(folder.glob(pattern)), advice) for pattern, advice in _INSTEAD.items())
    return next((f" (it has {files[0].name}: {advice})" for files, advice in matches if files), "")


def _indexed_files(folder: Path, index: Mapping[str, Any]) -> list[str]:
    """Return the files that the index names, which must be names of existing files without a path."""
    path, weight_map = folder / INDEX, index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map {{tensor: file}}; fetch it again")
    for name, file in weight_map.items():
        is_name = isinstance(file, str) and file.isprintable() and not {"/", "\\"} & {*file}
        if not is_name or not file.endswith(SUFFIX) or len(file.encode()) > MAX_FILE_NAME:
            raise CheckpointError(
                f"{path} places tensor {shown(name)} in {shown(file)}, which is not the name of a {SUFFIX} file in its "
                "folder; fetch the index of the safetensors files"
            )
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(files)} files that {INDEX} names: "
            f"{listed(missing)}; fetch them again"
        )
    return files


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of a file in order of position.

    Raises CheckpointError for a file that is not whole by the safetensors library, or holds what is not read here.
    """
    try:
        # safe_open validates names, shapes, positions and the size; it calls a file that may not be read missing
        with path.open("rb") as file, safe_open(path, "numpy"):
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
    except PermissionError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; ask its owner for chmod +r"
        ) from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is no whole safetensors file ({shown(str(error))}): it is damaged, truncated or a Git LFS "
            "pointer; fetch it again"
        ) from error
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]))
        if spec.dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} has dtype {spec.dtype}, the dtypes read are {', '.join(DTYPES)}; start "
                "from the original checkpoint, before it was quantized or saved for another program"
            )
        if not name.isprintable() or not 0 < len(name) <= MAX_NAME or max(spec.shape, default=0) > MAX_SIZE:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} of shape {shown(list(spec.shape))} is damaged; fetch it again"
            )
        if spec.row_bytes > MAX_ROW_BYTES:
            raise CheckpointError(
                f"{path}: tensor {name} has rows of {spec.row_bytes} bytes, at most {MAX_ROW_BYTES} are read; fetch it "
                "again"
            )
        tensors.append(StoredTensor(spec, path.name, 8 + length + entry["data_offsets"][0]))
    return tensors


class Reader:
    """A reader of rows of a checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> Reader:
        try:
            for file in self.checkpoint.files:
                self._descriptors[file] = os.open(self.checkpoint.folder / file, os.O_RDONLY)
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def rows(self, name: str, rows: slice) -> Tensor:
        """Read rows of a tensor as [rows, columns], where columns combine all dimensions but the first."""
        return self._rows(self.checkpoint.tensors[name], rows)

    def _rows(self, stored: StoredTensor, rows: slice) -> Tensor:
        if not stored.parts:
            return self._read(stored, rows)
        values, bitmask, _, *offsets = stored.parts
        try:
            if len(values.spec.shape) == 1:
                starts = [
                    *self._read(offsets[0], slice(0, stored.spec.rows)).flatten().tolist(),
                    values.spec.rows,
                ]
                if sorted(starts) != starts or starts[0] < 0:
                    raise ValueError(f"{offsets[0].spec.name} does not ascend from 0 to {values.spec.rows}")
                compressed = self._read(values, slice(starts[rows.start], starts[rows.stop])).flatten()
            else:
                compressed = self._read(values, rows)
            return decompress(compressed, self._read(bitmask, rows), stored.spec.columns)
        except ValueError as error:
            raise CheckpointError(
                f"{stored.spec.name} of {self.checkpoint.folder}, rows {rows.start} to {rows.stop}: {error}; fetch "
                "or convert it again"
            ) from error

    def _read(self, stored: StoredTensor, rows: slice) -> Tensor:
        spec, file, start = stored[:3]
        count = rows.stop - rows.start
        raw = torch.empty(count * spec.row_bytes, dtype=torch.uint8)
        view, position = bytes_of(raw), start + rows.start * spec.row_bytes
        while view:
            done = os.preadv(self._descriptors[file], [view], position)  # a read may be short
            if not done:
                path = self.checkpoint.folder / file
                raise CheckpointError(
                    f"{path} became shorter while it was read; convert again once it is whole"
                )
            view, position = view[done:], position + done
        return raw.view(DTYPES[spec.dtype]).view(count, spec.columns)

    def glance(self, file: str, start: int) -> bytes:
        """Read the first bytes of a tensor."""
        return os.pread(self._descriptors[file], GLANCE, start)

    def whole(self, name: str) -> Tensor:
        """Read a whole tensor in its own shape."""
        spec = self.checkpoint.tensors[name].spec
        return self.rows(name, slice(0, spec.rows)).view(spec.shape)


def plan_file(specs: Iterable[TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """Return the layout of a file: its first bytes (length and header), the start of each tensor, and its size.

    Tensors are sorted by descending width of their dtype, so that all are aligned.
    """
    ordered = sorted(specs, key=lambda spec: -DTYPES[spec.dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, position = {}, 0
    for spec in ordered:
        end = position + spec.nbytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        starts[spec.name], position = position, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    first = struct.pack("<Q", len(text)) + text
    return first, {name: len(first) + start for name, start in starts.items()}, len(first) + position


class Writer:
    """A writer of one safetensors file; its tensors are known beforehand, and written in any order from any thread.

    It is a context manager: when the block ends without an error, the file is synced to the disk.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        specs = list(specs)
        first, self._starts, size = plan_file(specs)
        self._specs = {spec.name: spec for spec in specs}
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.ftruncate(self._descriptor, size)
        write_at(self._descriptor, memoryview(first), 0)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, name: str, row: int, values: Tensor) -> None:
        """Write ``values`` [rows, columns] into a tensor, starting at row ``row``."""
        spec = self._specs[name]
        assert NAMES[values.dtype] == spec.dtype
        write_at(self._descriptor, bytes_of(values.contiguous()), self._starts[name] + row * spec.row_bytes)


def bytes_of(x: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU without copying."""
    raw = x.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)  # type: ignore[arg-type]  # numpy's stubs before 2.1 do not say Buffer


def write_at(descriptor: int, view: memoryview, position: int) -> None:
    """Write all of ``view`` at a position of a file; one pwrite may write less."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], position + done)
