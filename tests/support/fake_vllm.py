"""A fake ``vllm`` command and a fake engine process that record their arguments and report fixed times."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

from models import write_config
from typer.testing import CliRunner, Result

from benchmarks.cli import app

PYTHON = sys.executable
FLAGS = ("USE_CUSPARSELT", "USE_CUBLASLT", "DISABLE_SLIDESPARSE", "SPARSITY", "VLLM_PLUGINS")
CONDITIONS = {"gpu": None, "capability": None, "cpu": "a test's", "versions": {"vllm": "0.28.0"}}

# It appends its arguments and flags to a file, behaves as another file says, and reports a time that depends only on
# the system.
FAKE = """\
#!{python}
import json, os, sys, time
words = sys.argv[1:]
option = lambda name: words[words.index(name) + 1]
flags = {{name: os.environ[name] for name in {flags!r} if name in os.environ}}
with open({calls!r}, "a") as file:
    file.write(json.dumps({{"words": words, "flags": flags}}) + "\\n")
config = json.load(open(os.path.join(option("--model"), "config.json")))
pattern = config["quantization_config"].get("slidesparse", {{}}).get("pattern", "2:4")
behave = json.load(open({behaviour!r}))
system = "sparse" if "USE_CUSPARSELT" in flags else "cublaslt" if "USE_CUBLASLT" in flags else "stock"
if system in behave.get("fail", ()):
    print("INFO starting")
    print("RuntimeError: the cause")
    print("\\n".join(f"line {{i}}" for i in range(30)))
    sys.exit(7)
time.sleep(behave.get("sleep", 0))
kind = {{"sparse": "sparse", "cublaslt": "on the cuBLASLt path (dense)"}}.get(system)
if kind:
    print(f"SlideSparse {{pattern}} (2 of every few pruned): 8 layers {{kind}}, 1 dense (1 lm_head); dense layout")
prompts = int(option("--num-prompts"))
elapsed = {{"stock": 2.0, "cublaslt": 4.0, "sparse": 1.0}}[system]
total = prompts * (int(option("--input-len")) + int(option("--output-len")))
with open(option("--output-json"), "w") as file:
    json.dump({{"elapsed_time": elapsed, "num_requests": prompts, "total_num_tokens": total}}, file)
"""


class Fake:
    """A folder of checkpoints, a fake ``vllm`` for the PATH, and the calls that it recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.calls_path, self.behaviour = folder / "calls", folder / "behaviour"
        self.behave()
        self.bin = folder / "bin"
        self.bin.mkdir()
        script = self.bin / "vllm"
        script.write_text(
            FAKE.format(
                python=sys.executable, flags=FLAGS, calls=str(self.calls_path), behaviour=str(self.behaviour)
            )
        )
        script.chmod(0o755)
        for name, pattern in (("2_4", "2:4"), ("2_8", "6:8")):
            write_config(folder / "tiny" / name, pattern)

    def behave(self, **settings: Any) -> None:
        self.behaviour.write_text(json.dumps(settings))

    def run(self, *options: str, model: bool = True) -> Result:
        """Run the command, with one small prefill cell unless ``options`` have ``--stages``."""
        arguments = ["--model", str(self.folder / "tiny")] if model else []
        if "--stages" not in options:
            arguments += ["--stages", "prefill", "--m", "64"]
        return CliRunner().invoke(app, ["e2e", *arguments, "--out", str(self.out), *options])

    @property
    def calls(self) -> list[dict[str, Any]]:
        if not self.calls_path.exists():
            return []
        return [json.loads(line) for line in self.calls_path.read_text().splitlines()]

    @property
    def rows(self) -> list[dict[str, str]]:
        with (self.out / "e2e.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    @property
    def systems(self) -> list[str]:
        return [f"{row['system']} {row['pattern']}" for row in self.rows]


# It behaves as the worker does, reports a time that depends only on the system, and records its input.
WORKER = """\
import json, os, sys
system = ("sparse" if "USE_CUSPARSELT" in os.environ else "stock")
def note(message):
    with open({calls!r}, "a") as file:
        file.write(json.dumps([system, message]) + "\\n")
words = json.loads(sys.stdin.readline())
note(words)
option = lambda name: words[words.index(name) + 1]
if system in {broken!r}:
    sys.exit("RuntimeError: out of memory")
if system == "sparse":
    pattern = json.load(open(option("--model") + "/config.json"))["quantization_config"]["slidesparse"]["pattern"]
    print(f"SlideSparse {{pattern}} (2 of every few pruned): 8 layers sparse", file=sys.stderr, flush=True)
print("null", flush=True)
for line in sys.stdin:
    limit, words = json.loads(line)
    note([limit, words])
    prompts = int(option("--num-prompts"))
    total = prompts * (int(option("--input-len")) + int(option("--output-len")))
    with open(option("--output-json"), "w") as file:
        json.dump({{"elapsed_time": {{"stock": 2.0, "sparse": 1.0}}[system], "num_requests": prompts,
                   "total_num_tokens": total}}, file)
    joules, step = {{"stock": (8.0, 0.5), "sparse": (4.0, 0.25)}}[system]
    m = limit or prompts
    print(json.dumps({{"joules": joules, "steps": [[m, 9.0], [m, step], [m, step], [m, 1.0]]}}), flush=True)
"""
