"""docker/Dockerfile, as far as it can be tested without docker."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from slidesparse.build import compile
from slidesparse.build.find import ToolchainError

ROOT = Path(__file__).parents[2]
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
    assert modes == {**readable, "tuned": 0o075, "losses": 0o075}
    kernels.chmod(0o775)
    with pytest.raises(ToolchainError, match="another user may be able to replace"):
        compile._require_trusted(kernels)
