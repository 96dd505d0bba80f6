"""Run the commands that README.md shows, in its order, and say what each did, as rows of a table.

    python tools/readme.py MODEL DATA [--add 'vllm serve=--max-model-len 512'] [--limit 600] [--leave 'pip|make']

MODEL (a folder, or an id of the Hub) and DATA (a file of text) take the places of the names in the README; each command
that writes a checkpoint gets a new folder, and later ones read the last.  A server is asked for a text, then stopped.
Needs an installation of this project; standard library only.  Exits with 1 if a command failed, other than by saying
that this machine lacks something (exit code 3).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
COMMAND = re.compile(
    r"^\$ (.+?)(?:  +#.*)?$|`((?:[A-Z_]+=\S+ )*(?:slidesparse|vllm) [a-z][^`]*)`", re.MULTILINE
)
WRITES = re.compile(r"slidesparse (?:convert|synth) ")
LACKS = 3  # the exit code of a machine that lacks something
PROMPT, PORT = "The capital of France is", 8731
GRACE = 20  # seconds in which what is asked to end may do so


def commands(text: str) -> list[str]:
    """Return the commands of a page, in its order, each once in a row."""
    found = [" ".join((shown or inline).split()) for shown, inline in COMMAND.findall(text)]
    return [command for i, command in enumerate(found) if command not in found[max(0, i - 1) : i]]


def filled(command: str, values: dict[str, str], data: str) -> str:
    """Return a command with ``values`` in the places of names, and ``data`` in that of files of text."""
    name = re.compile(rf"\b(?:{'|'.join(values)}|texts?\.(?:jsonl|txt))\b")
    return name.sub(lambda found: shlex.quote(values.get(found[0], data)), command)


def ask(process: subprocess.Popen[bytes], limit: float) -> str:
    """Return what a server writes after PROMPT, once it is up.

    Raises OSError if it refuses, and TimeoutError, which is one, if it ends or takes longer.
    """
    server, end = f"http://127.0.0.1:{PORT}", time.monotonic() + limit
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(f"{server}/health", timeout=limit):
            break
        time.sleep(2)
    else:
        raise TimeoutError
    body = json.dumps({"prompt": PROMPT, "max_tokens": 16, "temperature": 0}).encode()
    request = urllib.request.Request(f"{server}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=limit) as answer:
        return repr(json.load(answer)["choices"][0]["text"])


def run(command: str, log: Path, limit: float) -> tuple[int, str]:
    """Run a command of the shell; return its exit code, and its last line or the server's answer."""
    serves = " vllm serve " in f" {command}"
    with log.open("wb") as file:
        line = f"{command} --port {PORT}" if serves else command
        process = subprocess.Popen(
            ["bash", "-c", line], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if serves:
                return 0, ask(process, limit)
            code = process.wait(limit)
        except (OSError, subprocess.TimeoutExpired):
            code = process.poll() or 124
        finally:
            for ending in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, ending)
                    process.wait(GRACE)
    lines = log.read_text(errors="replace").split("\n")
    return code, next((line.strip() for line in reversed(lines) if line.strip()), "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument(
        "--add",
        metavar="WORDS=OPTIONS",
        action="append",
        default=[],
        help="options for commands with these words, such as '--calib=--samples 16 --seqlen 256'",
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds of a command")
    parser.add_argument("--leave", default="pip|make", help="a regex of commands that are not run")
    arguments = parser.parse_args()
    data = str(arguments.data.resolve())
    added = [text.partition("=")[::2] for text in arguments.add]
    work, out, failed = Path(tempfile.mkdtemp(prefix="readme-")), Path("OUT"), False
    print(
        f"logs: {work}\n\n| command | exit code | seconds | last line, or a server's text |\n|---|---:|---:|---|"
    )
    for number, command in enumerate(commands(README.read_text("utf-8"))):
        if re.match(arguments.leave, command):
            continue
        if WRITES.match(command):
            out = work / f"out{number}"
        line = filled(command, {"ORG/NAME": arguments.model, "MODEL": arguments.model, "OUT": str(out)}, data)
        line = " ".join([line, *(options for words, options in added if words in command)])
        began = time.monotonic()
        code, last = run(line, work / f"{number}.log", arguments.limit)
        failed |= code not in (0, LACKS)
        last = last[:160].replace("|", "/")
        print(f"| `{command}` | {code} | {time.monotonic() - began:.0f} | {last} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
