"""Measure the speed and the peak memory of converting a synthetic BF16 Llama-style model in a child process.

The source is in the page cache, because it has just been written; the measured time includes syncing the output to the
disk.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.synth import synth
from slidesparse.convert.synth_model import tensors
from slidesparse.pattern import SlidePattern

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 32000
GOAL_MB_PER_S = 200.0  # MB/s of BF16 input on two processors
GIGABYTE = 10**9

# What the child runs: its peak is the interpreter, torch and the conversion.
CHILD = """
import json, resource, sys
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.stream import convert
from slidesparse.pattern import SlidePattern
source, out, sparsity, quant, layout = sys.argv[1:]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = convert(source, out, ConvertOptions(SlidePattern.parse(sparsity), quant, layout))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
json.dump([report.seconds, report.bytes_in, report.bytes_out, before * 1024, after * 1024], sys.stdout)
"""


@dataclass(frozen=True)
class Result:
    """One measurement and its conditions."""

    pattern: str
    quant: str
    layout: str
    bytes_in: int
    bytes_out: int
    largest_tensor: int
    seconds: float
    rate: float  # MB of BF16 input a second, validation, both passes and fsync included
    peak_bytes: int  # resident, of the whole process
    start_bytes: int  # of it before the conversion: Python and torch
    processors: int
    machine: str
    torch: str
    load: float  # system load average at the start

    @property
    def allowed_bytes(self) -> int:
        """The allowed peak: twice the largest tensor and 1 GB."""
        return 2 * self.largest_tensor + GIGABYTE

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "allowed_bytes": self.allowed_bytes}

    def render(self) -> str:
        """Return the result as text."""
        return "\n".join(
            [
                f"converted   {self.bytes_in / 1e6:.0f} MB BF16 -> {self.bytes_out / 1e6:.0f} MB {self.quant}, "
                f"{self.pattern}, {self.layout} layout, in {self.seconds:.1f} s",
                f"rate        {self.rate:.0f} MB/s of input (goal on two processors: {GOAL_MB_PER_S:.0f})",
                f"peak memory {self.peak_bytes / 1e6:.0f} MB, {self.start_bytes / 1e6:.0f} of it before the start "
                f"(allowed: {self.allowed_bytes / 1e6:.0f}, twice the largest tensor and 1 GB)",
                f"conditions  {self.processors} processors, {self.machine}, torch {self.torch}, "
                f"load {self.load:.1f}, source in the page cache, output synced",
            ]
        )


def write_model(out: Path, size: int) -> int:
    """Write a Llama-style checkpoint in BF16 of at least ``size`` bytes; return the bytes of its largest tensor."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }
    while sum(spec.nbytes for spec in tensors(config)) < size:
        config["num_hidden_layers"] += 1
    path = out.with_name("config.json")
    path.write_text(json.dumps(config))
    synth(path, out, quant="bf16")
    return max(spec.nbytes for spec in tensors(config))


def run(size: int, pattern: SlidePattern, quant: str, layout: str) -> Result:
    """Make the model in a temporary folder (below $TMPDIR), convert it, and measure.

    Raises CheckpointError for an option that is not known, and with its message when the conversion fails.
    """
    ConvertOptions(pattern, quant, layout)  # which checks them
    with tempfile.TemporaryDirectory(prefix="slidesparse-bench-") as scratch:
        source, out = Path(scratch) / "source", Path(scratch) / "out"
        largest = write_model(source, size)
        load = os.getloadavg()[0]
        command = [sys.executable, "-c", CHILD, str(source), str(out), pattern.ratio, quant, layout]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        if completed.returncode:
            last = (completed.stderr.strip() or "?").splitlines()[-1]
            raise CheckpointError(f"the conversion failed: {last}")
        seconds, bytes_in, bytes_out, before, after = json.loads(completed.stdout)
    return Result(
        pattern=pattern.ratio,
        quant=quant,
        layout=layout,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        largest_tensor=largest,
        seconds=seconds,
        rate=bytes_in / 1e6 / seconds,
        peak_bytes=after,
        start_bytes=before,
        processors=len(os.sched_getaffinity(0)),
        machine=platform.machine(),
        torch=torch.__version__,
        load=load,
    )
