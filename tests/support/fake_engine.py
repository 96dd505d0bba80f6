"""A program in place of `benchmarks.e2e.worker`, whose times depend only on the system, and models to measure."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from models import write_config
from typer.testing import CliRunner, Result

from benchmarks.cli import app
from benchmarks.e2e import run as e2e_run

WORKER = """\
import json, os, sys
system = "sparse" if "USE_CUSPARSELT" in os.environ else "stock"
def note(message):
    with open({calls!r}, "a") as file:
        file.write(json.dumps(message) + "\\n")
words = json.loads(sys.stdin.readline())
note(words)
option = lambda name: words[words.index(name) + 1]
if system == {broken!r}:
    sys.exit("RuntimeError: out of memory")
if system == "sparse":
    pattern = json.load(open(option("--model") + "/config.json"))["quantization_config"]["slidesparse"]["pattern"]
    facts = {{"path": "sparse", "pattern": pattern, "layers": {{pattern: 8}}, "words": pattern}}
    print("SlideSparse summary: " + json.dumps(facts), file=sys.stderr, flush=True)
print("null", flush=True)
for line in sys.stdin:
    limit, words = json.loads(line)
    note([limit, words])
    prompts = int(option("--num-prompts"))
    total = prompts * (int(option("--random-input-len")) + int(option("--random-output-len")))
    with open(option("--output-json"), "w") as file:
        json.dump({{"elapsed_time": 2.0, "num_requests": prompts, "total_num_tokens": total}}, file)
    m, step = limit or prompts, {{"stock": 0.5, "sparse": 0.25}}[system]
    print(json.dumps({{"watts": 4.0, "steps": [[m, 9.0], [m, step], [m, step], [m, 1.0]]}}), flush=True)
"""


class Fake:
    """A folder of checkpoints, and the messages to the engines: [limit of tokens, words] but for the first."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str = "") -> None:
        self.folder, self.out, self.calls = folder, folder / "out", folder / "calls"
        (folder / "worker.py").write_text(WORKER.format(calls=str(self.calls), broken=broken))
        monkeypatch.setattr(e2e_run, "WORKER", (sys.executable, str(folder / "worker.py")))
        facts = {"gpu": None, "capability": None, "cpu": "a test's", "versions": {"vllm": "0.28.0"}}
        monkeypatch.setattr(e2e_run, "conditions", lambda: dict(facts))
        for name, pattern in (("2_4", "2:4"), ("2_8", "6:8")):
            write_config(folder / "tiny" / name, pattern)

    def run(self, *options: str) -> Result:
        self.calls.write_text("")
        common = ("--model", str(self.folder / "tiny"), "--out", str(self.out), "--systems", "stock,sparse")
        sizes = ("--m", "64,128", "--decode-m", "64,128", "--decode-steps", "8", "--rounds", "2", "--json")
        return CliRunner().invoke(app, ["e2e", *common, *sizes, *options])

    def messages(self, first: bool) -> list[Any]:
        lines = (json.loads(line) for line in self.calls.open())
        return [message for message in lines if isinstance(message[0], str) == first]

    @property
    def rows(self) -> list[dict[str, str]]:
        with (self.out / "e2e.csv").open(newline="") as file:
            return list(csv.DictReader(file))
