"""docker/Dockerfile, as far as a machine without docker can tell: what it says, and its steps run here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from slidesparse import toolchain
from slidesparse.backends import VLLM_ON_GPUS

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "docker" / "Dockerfile"
CONTEXT = "/opt/slidesparse"  # where the image keeps the build context


def parse(text: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, its arguments) each, comments left out, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (name.upper(), rest.strip()) for name, _, rest in (row.partition(" ") for row in joined.splitlines())
    ]


@cache
def instructions() -> list[tuple[str, str]]:
    return parse(DOCKERFILE.read_text())


def arguments(name: str) -> list[str]:
    """The arguments of each instruction ``name``."""
    return [rest for found, rest in instructions() if found == name]


def ignored(path: str, rules: str) -> bool:
    """Whether .dockerignore keeps ``path`` from the build: the last rule that matches it or a folder above decides."""
    answer = False
    folders = ["/".join(path.split("/")[: n + 1]) for n in range(path.count("/") + 1)]
    for rule in rules.splitlines():
        pattern = rule.strip().lstrip("!")
        if not pattern or pattern.startswith("#"):
            continue
        anywhere = pattern.removeprefix("**/")
        for folder in folders:
            name = folder.rpartition("/")[2] if anywhere != pattern else folder
            if name.count("/") == anywhere.count("/") and fnmatchcase(name, anywhere):
                answer = not rule.strip().startswith("!")
    return answer


def carried(folder: Path) -> list[str]:
    """What of the working tree reaches the build: the files that a COPY names and .dockerignore lets through."""
    rules = (ROOT / ".dockerignore").read_text()
    names = [source for copy in arguments("COPY") for source in shlex.split(copy)[:-1]]
    paths = [
        p for name in names for p in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    relative = [path.relative_to(ROOT).as_posix() for path in paths if path.is_file()]
    kept = [name for name in relative if not ignored(name, rules)]
    for name in kept:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return kept


def test_the_base_is_a_tested_release_chosen_by_an_argument() -> None:
    assert instructions()[0][0] == "ARG"
    (base,) = arguments("FROM")
    assert base == "vllm/vllm-openai:v${VLLM_VERSION}"
    defaults = dict(rest.split("=", 1) for rest in arguments("ARG") if "=" in rest)
    assert defaults["VLLM_VERSION"] in VLLM_ON_GPUS
    assert "latest" not in DOCKERFILE.read_text()


def test_the_entry_point_and_the_user_stay_the_bases() -> None:
    assert {name for name, _ in instructions()} == {"ARG", "FROM", "RUN", "COPY", "ENV", "LABEL"}


def test_no_step_names_an_architecture() -> None:
    assert not re.search(r"x86|amd64|arm64|aarch64|--platform", DOCKERFILE.read_text().partition("\nARG")[2])


def test_nothing_secret_is_declared_or_copied() -> None:
    secret = re.compile(r"token|secret|passw|credential|api_?key|id_rsa|\.env\b|netrc", re.I)
    assert [
        rest for name, rest in instructions() if name in ("ARG", "ENV", "COPY") and secret.search(rest)
    ] == []
    rules = (ROOT / ".dockerignore").read_text()
    for name in (
        ".env",
        ".netrc",
        ".git/config",
        ".venv/bin/python",
        "demo_out/x.safetensors",
        "tests/conftest.py",
    ):
        assert ignored(name, rules), name


def test_every_source_is_there_and_reaches_the_build(tmp_path: Path) -> None:
    kept = carried(tmp_path)
    for copy in arguments("COPY"):
        *sources, target = shlex.split(copy)
        assert target.startswith(CONTEXT)
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(name == source or name.startswith(f"{source}/") for name in kept), source
            if len(sources) == 1:  # lands where the repository has it
                assert target == f"{CONTEXT}/{source}"
    assert {"slidesparse/cli.py", "vllm_patch/config.py", "csrc/library.h", "setup.py"} <= set(kept)
    assert not [name for name in kept if "__pycache__" in name or name.endswith(".so")]


@pytest.mark.parametrize(
    ("path", "rules", "expected"),
    [
        ("a/b.py", "*", True),
        ("a/b.py", "*\n!a", False),
        ("a/b.py", "*\n!a/b.py", False),
        ("a/c.py", "*\n!a/b.py", True),
        ("a/x/__pycache__/b.pyc", "*\n!a\n**/__pycache__", True),
        ("a/b.so", "!a\n**/*.so", True),
        ("a/b.py", "# *\n", False),
    ],
)
def test_the_rules_of_dockerignore(path: str, rules: str, expected: bool) -> None:
    assert ignored(path, rules) is expected


@pytest.mark.parametrize(
    "step",
    [rest for name, rest in parse(DOCKERFILE.read_text()) if name == "RUN"],
    ids=lambda step: step[:20],
)
def test_each_step_is_shell(step: str) -> None:
    """dash, as in the image's /bin/sh, where there is one."""
    shell = shutil.which("dash") or shutil.which("sh")
    assert shell
    done = subprocess.run([shell, "-n", "-c", step], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_compiler_is_installed_only_where_it_lacks(tmp_path: Path) -> None:
    """The first step, with stand-ins on the PATH: nothing with a compiler and Python.h, apt-get without."""
    step = arguments("RUN")[0]
    log = tmp_path / "log"

    def tool(name: str, body: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run() -> str:
        log.write_text("")
        command = step.replace("/var/lib/apt/lists", str(tmp_path / "lists"))
        done = subprocess.run(["/bin/sh", "-c", command], env={"PATH": str(tmp_path)}, check=False)
        assert done.returncode == 0
        return log.read_text()

    include = tmp_path / "include" / "python3.12"
    include.mkdir(parents=True)
    (include / "Python.h").touch()
    tool("python3", f"echo {include}")
    tool("apt-get", f'echo "$@" >> {log}')
    for name in ("basename", "rm"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    tool("c++", "")
    assert run() == ""
    (include / "Python.h").unlink()
    assert run().splitlines() == ["update", "install -y --no-install-recommends g++ python3.12-dev"]
    (include / "Python.h").touch()
    (tmp_path / "c++").unlink()
    assert len(run().splitlines()) == 2


def has_setuptools() -> bool:
    try:
        return toolchain.numbers(version("setuptools")) >= (77,)
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the image's pip line, as written, installed what the image's context holds."""
    if not has_setuptools():
        pytest.skip("setuptools 77 or later is not installed: pip install 'setuptools>=77'")
    context, target = tmp_path_factory.mktemp("context"), tmp_path_factory.mktemp("image")
    carried(context)
    (line,) = re.findall(rf"python3 -m pip install [^&]*{CONTEXT}(?=\s|$)", "\n".join(arguments("RUN")))
    words = [str(context) if word == CONTEXT else word for word in shlex.split(line)[1:]]
    offline = ["--quiet", "--no-deps", "--no-index", "--target", str(target)]
    done = subprocess.run(
        [sys.executable, *words, *offline],
        capture_output=True,
        text=True,
        cwd=context,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


def python(image: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with what the image installed before all else."""
    environ = {**os.environ, "PYTHONPATH": str(image), "SLIDESPARSE_CACHE": str(image / "cache")}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=environ,
        cwd=image,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_what_the_pip_line_installs(image: Path) -> None:
    assert (image / "slidesparse" / "vllm_patch" / "config.py").is_file()
    assert (image / "slidesparse" / "csrc" / "library.h").is_file()
    assert (image / "bin" / "slidesparse").is_file()
    where = python(image, "-c", "import slidesparse.vllm_patch as p; print(p.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(image), where.stderr


@pytest.mark.slow
def test_doctor_ends_the_build_and_does_not_fail_without_a_gpu(image: Path) -> None:
    assert re.match(rf"slidesparse doctor && python3 {CONTEXT}/docker/check_image.py$", arguments("RUN")[-1])
    done = python(image, str(image / "bin" / "slidesparse"), "doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert Path(json.loads(done.stdout)["slidesparse"]["path"]) == image / "slidesparse"


@pytest.mark.slow
@pytest.mark.vllm
def test_the_check_says_what_the_image_lacks(image: Path) -> None:
    """Libraries and compiler are stand-ins: a library too old, an extension that cannot be built, and neither."""
    check = str(ROOT / "docker" / "check_image.py")
    script = f"""
import runpy, sys
from slidesparse import doctor, toolchain
doctor._torch = lambda: {{"version": None}}  # not asked for here, and slow to import
toolchain.find_library = lambda name, cuda=None: toolchain.Found(name, "wheel", sys.argv[1])
toolchain.extension_state = lambda name: toolchain.Extension(sys.argv[2], None)
toolchain.build = lambda name: (_ for _ in ()).throw(toolchain.ToolchainError(f"{{name}} cannot be built", "-"))
runpy.run_path({check!r}, run_name="__main__")
"""
    done = python(image, "-c", script, "0.8.0", "installed")
    assert (done.returncode, done.stderr) == (0, "")
    done = python(image, "-c", script, "0.7.1", "installed")
    assert done.returncode == 1
    assert "cuSPARSELt 0.7.1 was found, 0.8 to 0.10 is supported" in done.stderr
    done = python(image, "-c", script, "0.8.0", "can be built when first used")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["cusparselt cannot be built; -", "cublaslt cannot be built; -"]


def test_the_readme_of_the_image_names_what_the_image_has() -> None:
    text = (ROOT / "docker" / "README.md").read_text()
    (environ,) = arguments("ENV")
    assert f":{environ.split('=')[1]}" in text
    for argument in ("VLLM_VERSION", "SOURCE", "REVISION"):
        assert f"--build-arg {argument}=" in text
