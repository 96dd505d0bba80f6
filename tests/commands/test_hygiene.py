"""Rules for all files of the project, and docker/Dockerfile, as far as it can be tested without docker."""

from __future__ import annotations

import re
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from slidesparse.build import compile
from slidesparse.build.find import ToolchainError

ROOT = Path(__file__).parents[2]

# Written in parts, so that this file does not match itself.
FORBIDDEN = [
    r"pypi" + r"\.org",
    r"python" + r"hosted",
    r"registry\." + r"npmjs",
    r"deb\." + r"debian",
    r"(?<![\w.])/(?:work|home|root|Users)" + r"/",
    r"\.\./" + "shared",
    r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
]


def tracked() -> list[Path]:
    """List the files that git tracks or would track, or those of a source archive without git."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        folders = ("slidesparse", "vllm_patch", "csrc", "tests", "benchmarks", "docs", "tools", "docker")
        paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    return sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


FILES = tracked()


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_file_has_forbidden_text(pattern: str) -> None:
    """Hosts of package registries, absolute paths of one machine, and marks of unfinished work are forbidden."""
    matches = []
    for path in FILES:
        text = path.read_bytes().decode("utf-8", errors="ignore")
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(pattern, line):
                matches.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert matches == []


def test_shell_scripts_stop_at_errors() -> None:
    for path in FILES:
        if path.suffix == ".sh" or path.parent.name == ".ci":
            assert "set -euo pipefail" in path.read_text(), path
            assert path.stat().st_mode & 0o111, f"{path} is not executable"


def test_links_between_pages_lead_somewhere() -> None:
    def anchors(page: Path) -> set[str]:
        titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
        return {re.sub(r"[^\w -]", "", title.strip().lower()).replace(" ", "-") for title in titles}

    broken = []
    for page in (path for path in FILES if path.suffix == ".md"):
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            other = (page.parent / name).resolve() if name else page
            if not other.exists() or (anchor and anchor not in anchors(other)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


def test_dockerfile_copies_existing_unignored_files() -> None:
    ignored, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"]
    assert ignored == "*"
    copies = re.findall(r"^COPY (.+)$", DOCKERFILE, re.M)
    sources = [source for arguments in copies for source in shlex.split(arguments)[:-1]]
    assert {"slidesparse", "vllm_patch", "csrc", "setup.py"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in kept


def test_compiled_kernels_of_the_image_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users may read all of the cache, and write only what is measured later."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(cache))
    kernels = cache / "extensions" / "key" / "kernels.so"
    kernels.parent.mkdir(parents=True)
    kernels.touch(mode=0o700)
    (step,) = re.findall(r"^RUN slidesparse build(.*?)\n\n", DOCKERFILE, re.M | re.S)
    subprocess.run(["sh", "-ec", f"chgrp() {{ :; }}; true {step}"], check=True)
    compile._require_trusted(kernels)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in [cache, *cache.rglob("*")]}
    readable = dict.fromkeys(("cache", "extensions", "key", "kernels.so"), 0o055)
    assert modes == {**readable, **dict.fromkeys(("tuned", "losses", "texts"), 0o075)}
    kernels.chmod(0o775)
    with pytest.raises(ToolchainError, match="another user may be able to replace"):
        compile._require_trusted(kernels)
