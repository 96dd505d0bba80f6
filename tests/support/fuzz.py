"""Damage tiny converted checkpoints at random, from a seed, and run the commands on them.

A command must give a correct result or a one-line error of SlideSparse.  Anything else (another exception, a time or
memory limit exceeded, a wrong result) is a `Defect`, which is printed with the number of its case.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from checkpoints import INDEX, block_of, config_of, convert, edit_block, edit_json, tensors_of, write
from foreign import tools
from models import Decoder, float_tensors
from packed import packed_layout
from safetensors.torch import load_file

from slidesparse.checkpoint import output, storage
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.metadata import KEY, LAYOUTS, Metadata
from slidesparse.checkpoint.storage import FLOATS, NAMES
from slidesparse.checkpoint.w8a8 import parse_block
from slidesparse.errors import SlideSparseError
from slidesparse.pattern import parse_pattern
from slidesparse.prune import prune
from slidesparse.quantize import dequantize_blocks
from slidesparse.slide import lift, unslide

TINY = Decoder("LlamaForCausalLM", hidden=64, intermediate=80, heads=2, kv_heads=1, layers=1, vocabulary=64)
FLOAT = "float"  # stands for a source that is not converted yet
MIXED = "mixed"  # layers of several patterns; with 2 shards, of blocks that are 2:4 or dense
FOREIGN = "foreign"  # as another tool writes it, a format in turn
KINDS = [
    (layout, quant, n) for layout in (*LAYOUTS, FLOAT, MIXED) for quant in ("int8", "fp8") for n in (1, 2)
]
KINDS += [(FOREIGN, tool, 1) for tool in tools()]
SECONDS = 60.0  # limit for a command on a busy machine; it usually takes some hundredths of a second
MEMORY = 1 << 30  # limit of the bytes that a command allocates
MAX_LINE_LENGTH = 1500
MORE = int(os.environ.get("FUZZ_TIMES", "1"))  # times as many cases as `make test` runs

QUANTIZATION = "quantization_config"
DEEP = "deep"  # stands for a value nested too deeply for json.dumps
TEXTS = (
    "x 6:8 8:10 2_inf 4:6 9998:10000 slided dense int8 ../x.safetensors /etc/passwd model.safetensors re:(.*)*z$ "
    "compressed-tensors slidesparse I8 F8_E4M3 BF16 F32 channel tensor block"
)
NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *(*TEXTS.split(), "", "x" * 3000, "\ud800", "a\nb", "\x1b[31m"),
    *([], {}, [1], [[]], {"a": 1}, ["re:(a|a)*"], [None], {"": {}}, [0, 0], [64, 96], [2**62, 0], DEEP),
]


class Defect(Exception):  # noqa: N818  a finding, not a fault
    """Raised when a command does what it must never do."""


# Damage


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all values that a JSON value contains."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*above, key)
        yield from _places(inner, (*above, key))


def damage_json(document: Any, rng: random.Random, below: tuple[Any, ...] = ()) -> str:
    """Change one value of a document, below a path, and return a description of the change."""
    places = [place for place in _places(document) if place[: len(below)] == below]
    if not places:
        return "nothing"
    place = rng.choice(places)
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    key, change = place[-1], rng.randrange(6)
    if change == 0:
        del holder[key]
        return f"remove {place}"
    if change == 1 and isinstance(holder, dict):
        names = ["", "x", "slidesparse", "\ud800", "a\nb", str(key).upper(), str(key) + "x", "lm_head"]
        new = rng.choice(names)
        holder[new] = holder.pop(key)
        return f"rename {place} to {new!r}"
    if change == 2:
        other = rng.choice(places)
        source: Any = document
        for step in other:
            source = source[step]
        holder[key] = json.loads(json.dumps(source))
        return f"{place} as {other}"
    if change == 3 and type(holder[key]) in (int, float):
        holder[key] += rng.choice([-1, 1, 8, -8, 64])
        return f"{place} {holder[key]}"
    holder[key] = copy.deepcopy(rng.choice(NASTY))
    return f"{place} {str(holder[key])[:40]!r}"


def dump(document: Any) -> bytes:
    return json.dumps(document).replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000).encode()


def damage_bytes(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Flip, cut, insert or repeat some bytes, and return them with a description of the change."""
    at, change = rng.randrange(len(raw) + 1), rng.randrange(5)
    if change == 0:
        return raw[:at], f"cut at {at}"
    if change == 1:
        return raw[:at] + rng.randbytes(rng.randint(1, 9)) + raw[at:], f"insert at {at}"
    if change == 2:
        return raw + raw[:at], f"append {at}"
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed), "flip bits"


def _index(folder: Path, rng: random.Random) -> str:
    path = folder / INDEX
    return damage_json_file(path if path.exists() else folder / "config.json", rng)


def damage_json_file(path: Path, rng: random.Random, below: tuple[Any, ...] = ()) -> str:
    """Change up to three values of a file, below a path in its document."""
    document = json.loads(path.read_bytes())
    description = " and ".join(damage_json(document, rng, below) for _ in range(rng.choice([1, 1, 1, 2, 3])))
    path.write_bytes(dump(document))
    return f"{path.name}: {description}"


def _text(folder: Path, rng: random.Random) -> str:
    path = rng.choice([path for path in sorted(folder.iterdir()) if path.suffix == ".json"])
    raw, description = damage_bytes(path.read_bytes(), rng)
    path.write_bytes(raw)
    return f"{path.name}: {description}"


def _shard(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def _header(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    if rng.random() < 0.3:  # two tensors swap a field
        first, second = rng.sample([name for name in header if name != "__metadata__"], 2)
        field = rng.choice(["data_offsets", "shape", "dtype"])
        header[first][field], header[second][field] = header[second][field], header[first][field]
        description = f"{first} and {second} change {field}"
    else:
        description = damage_json(header, rng)
    text = dump(header)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return f"{path.name}: header: {description}"


def damage_header(path: Path, rng: random.Random) -> str:
    """Change some bytes of a header, or of its length."""
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    start = rng.choice([0, 8])
    changed, description = damage_bytes(raw[start:end], rng)
    path.write_bytes(raw[:start] + changed + raw[end:])
    return f"{path.name}: header: {description}"


def _data(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    raw = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    count = rng.choice([1, 1, 4, 100])
    for _ in range(count):
        raw[rng.randrange(start, len(raw))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.2:
        raw = raw[: rng.randrange(len(raw))]
    path.write_bytes(bytes(raw))
    return f"{path.name}: {count} bits of data, {len(raw)} bytes"


def _tensor(folder: Path, rng: random.Random) -> str:
    """Change the values, dtype or shape of one tensor, or remove it, in files that stay consistent."""
    config, tensors = config_of(folder), tensors_of(folder)
    name = rng.choice(sorted(tensors))
    tensor, change = tensors[name].clone(), rng.randrange(7)
    if change == 0 or (change in (2, 3) and not tensor.dim()):
        del tensors[name]
    elif change == 1:
        dtype = rng.choice([torch.int8, torch.bfloat16, torch.float32, torch.int32])
        tensors[name] = tensor.float().to(dtype)
    elif change == 2:
        tensors[name] = tensor[..., : rng.randrange(tensor.shape[-1])].clone()
    elif change == 3:
        tensors[name] = tensor[: rng.randrange(len(tensor))].clone()
    elif change == 4:
        tensors[name] = tensor.unsqueeze(rng.choice([0, -1])).contiguous()
    elif change == 5:
        layer = name.rpartition(".")[0]
        names = ["x", "lm_head.weight", name + "_scale", name + "x"]
        names += [layer + end for end in (".weight", ".compressed", ".bitmask", ".input_scale", ".qweight")]
        tensors[rng.choice(names)] = tensor
    elif tensor.numel():
        value = rng.choice([float("nan"), float("inf"), -1.0, 0.0, 100.0])
        if tensor.is_floating_point() or value in (0.0, 100.0):
            tensor.view(-1)[rng.randrange(tensor.numel())] = value
        tensors[name] = tensor
    shards = len(list(folder.glob("*.safetensors")))
    tokenizer = (folder / "tokenizer.json").read_bytes()
    for path in folder.iterdir():
        path.unlink()
    write(folder, config, {name: value.contiguous() for name, value in tensors.items()}, shards)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return f"tensor {name}: change {change}"


def damage_file(path: Path, change: int) -> str:
    """Remove a file, or replace it by one without content, a folder, a link, a loop or a pipe."""
    path.unlink()
    instead: dict[int, Callable[[], object]] = {
        1: path.touch,
        2: path.mkdir,
        3: lambda: path.symlink_to("/etc/passwd"),
        4: lambda: path.symlink_to(path.name),
        5: lambda: os.mkfifo(path),
    }
    instead.get(change, lambda: None)()
    return f"{path.name}: file {change}"


def _files(folder: Path, rng: random.Random) -> str:
    """Damage, copy or rename a file."""
    path, change = rng.choice(sorted(folder.iterdir())), rng.randrange(8)
    if change < 6:
        return damage_file(path, change)
    if change == 6:
        other = folder / rng.choice(["x.safetensors", "y.bin", "modules.json", INDEX, "z.py"])
        other.write_bytes(path.read_bytes())
    else:
        path.rename(folder / rng.choice(["x.safetensors", "config.json", "modules.json"]))
    return f"{path.name}: file {change}"


def _exchange(folder: Path, rng: random.Random) -> str:
    """Replace the quantization by another tool's, or parts of it, as a config.json fetched for other weights has it."""
    name = rng.choice(sorted(tools()))
    other, block = tools()[name][0], config_of(folder).get(QUANTIZATION) or {}
    change = rng.randrange(4)
    merged = [other, {**block, **other}, {**other, **block}, None][change]
    edit_json(folder / "config.json", **{QUANTIZATION: merged})
    return f"config.json: quantization of {name}, {change}"


KEEPS_WEIGHTS = ("config", "quantization", "metadata", "index", "text", "exchange")
DAMAGE: dict[str, Callable[[Path, random.Random], str]] = {
    "config": lambda folder, rng: damage_json_file(folder / "config.json", rng),
    "quantization": lambda folder, rng: damage_json_file(folder / "config.json", rng, (QUANTIZATION,)),
    "metadata": lambda folder, rng: damage_json_file(
        folder / "config.json", rng, (QUANTIZATION, "slidesparse")
    ),
    "exchange": _exchange,
    "index": _index,
    "text": _text,
    "header": _header,
    "header bytes": lambda folder, rng: damage_header(_shard(folder, rng), rng),
    "data": _data,
    "tensor": _tensor,
    "files": _files,
}


def make_sources(folder: Path) -> list[Path]:
    """Write one tiny model in all KINDS."""
    folders = []
    for layout, quant, shards in KINDS:
        source = folder / f"{FLOAT}-{quant}-{shards}"
        out = folder / f"{layout}-{quant}-{shards}"
        if layout == FOREIGN:
            block, store = tools()[quant]
            stored = dict(weights())
            for name in TINY.linears():
                stored |= {f"{name}.{k}": x.clone() for k, x in store(stored.pop(f"{name}.weight")).items()}
            write(out, {**TINY.config(), QUANTIZATION: block}, stored)
            folders.append(out)
            continue
        if not source.exists():
            write(source, TINY.config(), weights(), shards)
        if layout == MIXED:
            patterns = ["q_proj|k_proj|v_proj=4:6", "o_proj=dense", "down_proj=2:4"] if shards == 1 else []
            kind = {"layout": "slided"} if shards == 1 else {"pattern": "2:4"}
            convert(source, out, quant=quant, layer=patterns, **kind)
            if shards == 2:
                metadata = json.loads(json.dumps(block_of(out)[KEY]).replace('"2:4"', '"2:4@50%"'))
                edit_block(out, **{KEY: metadata})
        elif layout == "packed":
            single = packed_layout(folder / f"dense-{quant}-1", folder / f"single-{quant}-{shards}")
            write(out, config_of(single), tensors_of(single), shards)
        elif layout != FLOAT:
            convert(source, out, layout=layout, quant=quant)
        folders.append(out)
    return folders


@cache
def weights() -> dict[str, torch.Tensor]:
    """The tensors of the float model; its linear layers are 6:8."""
    return {
        name: prune(w, parse_pattern("6:8")) if name.removesuffix(".weight") in TINY.linears() else w
        for name, w in float_tensors(TINY).items()
    }


def damaged(source: Path, target: Path, case: int) -> str:
    """Make the damaged copy of a case, and return a description of the damage."""
    rng = random.Random(case)
    shutil.copytree(source, target)
    kind = rng.choice(sorted(DAMAGE))
    return f"{source.name}, {kind}: {DAMAGE[kind](target, rng)}"


# Outcomes


@contextmanager
def limits() -> Iterator[None]:
    """Raise Defect after SECONDS, and let allocations of more than MEMORY fail."""

    def expire(*_: object) -> None:
        raise Defect(f"it takes more than {SECONDS} s")

    current = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, expire)
    resource.setrlimit(resource.RLIMIT_AS, (current + MEMORY, limit[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limit)
        signal.signal(signal.SIGALRM, handler)


def require_clear(error: BaseException) -> str:
    """Return the class of a SlideSparse error; raise Defect for any other, or for one that is not a printable line."""
    if not isinstance(error, SlideSparseError):
        shown = "".join(traceback.format_exception(error))[-1500:]
        raise Defect(f"{type(error).__name__}: {str(error)[:300]}\n{shown}") from error
    message = str(error)
    if not message.isprintable() or not 0 < len(message) <= MAX_LINE_LENGTH:
        raise Defect(f"no clear line: {message!r:.1000}") from error
    return type(error).__name__


def outcome(command: Callable[[], str]) -> str:
    """Run a command and return its result, or "error"."""
    try:
        with limits():
            return command()
    except Defect:
        raise
    except Exception as error:
        require_clear(error)
        return "error"


def judge(folder: Path, original: Path, out: Path, damage: str) -> dict[str, str]:
    """Return the outcomes of `inspect`, and of `convert` to another layout.  Raises Defect if one is wrong."""
    other = "slided" if original.name.startswith("dense") else "dense"
    outcomes = {
        "inspect": outcome(lambda: "violations" if inspect(folder).violations else "ok"),
        "convert": outcome(lambda: "ok" if convert(folder, out, layout=other) else ""),
    }
    if outcomes["convert"] == "ok":
        try:
            stored(folder)
        except Exception as error:
            raise Defect(f"convert reads what the safetensors library refuses: {error}") from error
        if outcomes["inspect"] != "ok" and Metadata.of_config(config_of(folder).get("quantization_config")):
            raise Defect(f"inspect says {outcomes['inspect']}, but convert takes it")
        _require_same_products(folder, out)
        if keeps_weights(damage):
            require_same_weights(out)
    return outcomes


def keeps_weights(damage: str) -> bool:
    return damage.split(":")[0].rpartition(", ")[2] in KEEPS_WEIGHTS


def require_same_weights(out: Path) -> None:
    """Raise Defect unless the layers of a checkpoint are those of `weights`, but for zeros and rounding."""
    tensors, block = stored(out), config_of(out)[QUANTIZATION]
    metadata, parsed = Metadata.of_config(block), parse_block(block, tensors)
    for name in TINY.linears():
        w, entry = tensors[f"{name}.weight"], metadata.layers.get(name)
        true = weights()[f"{name}.weight"].float()
        scheme = parsed.scheme(name, NAMES[w.dtype])
        if (scheme is None) != (NAMES[w.dtype] in FLOATS):
            raise Defect(f"{name} is {w.dtype}, and by its config {scheme}")
        if entry and metadata.layout == "slided":
            w = unslide(w, entry.pattern, entry.in_features)
        w = w.float()
        if scheme:
            scale = tensors[name + scheme.scale].float()
            w = dequantize_blocks(w, scale, scheme.block) if scheme.block else w * scale.reshape(-1, 1)
        allowed = 0.02 * true.abs().amax(1, keepdim=True) + 0.13 * true.abs()
        if w.shape != true.shape or bool((((w - true).abs() > allowed) & (w != 0)).any()):
            raise Defect(f"{name} has other weights than the original")
        if int((w != 0).sum()) < 0.44 * true.numel():
            raise Defect(f"{name} has {int((w != 0).sum())} of {true.numel()} weights")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a model's files with the safetensors library, and packed ones with SlideSparse's reader."""
    tensors: dict[str, torch.Tensor] = {}
    checkpoint = storage.Checkpoint.open(folder)
    for file in checkpoint.files:
        tensors |= load_file(folder / file)
    with checkpoint.reader() as reader:
        return tensors | {name: reader.whole(name) for name in checkpoint.tensors if name not in tensors}


def _require_same_products(left: Path, right: Path) -> None:
    """Raise Defect unless the layers of both checkpoints, in any layout, give equal products."""
    products: list[dict[str, torch.Tensor]] = []
    for folder in (left, right):
        metadata = Metadata.of_config(config_of(folder).get("quantization_config"))
        tensors, outputs = stored(folder), {}
        for name, entry in (metadata.layers if metadata else {}).items():
            x = torch.arange(entry.in_features, dtype=torch.float64)[None].sin()
            if metadata and metadata.layout == "slided":
                x = lift(x, entry.pattern.layout(x.shape[-1]))
            scale = tensors[f"{name}.weight_scale"].double().reshape(-1, 1)
            outputs[name] = (tensors[f"{name}.weight"].float().double() * scale) @ x[0]
        products.append(outputs)
    for name in products[0].keys() & products[1].keys():
        if not torch.allclose(products[0][name], products[1][name], rtol=1e-12, atol=1e-9):
            raise Defect(f"{name}: the products of both layouts differ")


def run(
    first: int, count: int, serve: Callable[[Path, str, dict[str, str]], str] | None = None
) -> tuple[Counter[str], list[str]]:
    """Judge ``count`` cases from ``first`` on; return the counts of outcomes, and each defect with its case.

    ``serve`` is an additional command that gets the folder, the damage, and the outcomes of the others.
    """
    counts, defects = Counter[str](), list[str]()
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as name,
        patch.object(output, "sync", lambda path: None),  # the files need not be durable
        patch.object(os, "fsync", lambda descriptor: None),
    ):
        sources = make_sources(Path(name) / "sources")
        for case in range(first, first + count):
            source = sources[case % len(sources)]
            target, out = Path(name) / "damaged", Path(name) / "out"
            damage = damaged(source, target, case)
            try:
                outcomes = judge(target, source, out, damage)
                if serve:
                    outcomes["serve"] = serve(target, damage, outcomes)
                counts.update(f"{command}: {result}" for command, result in outcomes.items())
            except Defect as defect:
                defects.append(f"{case}: {damage}: {defect}")
            shutil.rmtree(target)
            shutil.rmtree(out, ignore_errors=True)
    return counts, defects
