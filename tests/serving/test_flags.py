"""Environment flags and their resolution with a checkpoint; errors of invalid or contradictory flags name a remedy."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import quantization_config

from slidesparse import flags, gemm
from slidesparse.checkpoint.metadata import KEY, LayerEntry, Metadata
from slidesparse.flags import FlagError, Flags
from slidesparse.gemm.backend import Backend
from slidesparse.pattern import SlidePattern
from slidesparse.resolve import STAMP, Resolution, ResolveError, claim, resolve, stamp, unread_storage

ROOT = Path(__file__).parents[2]
SIX_EIGHT = SlidePattern.parse("6:8")
DENSE = {"USE_CUBLASLT": "1"}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def with_gpu(monkeypatch: pytest.MonkeyPatch, **missing: str) -> None:
    """Simulate a machine whose GPU backends can run, except those for which ``missing`` gives a reason."""

    def unusable(self: Backend, device: torch.device, capability: object = None) -> str | None:
        return missing.get(self.name) if device.type == "cuda" else "it needs an NVIDIA GPU"

    for name in gemm.REGISTRY:
        backend = type(gemm.get(name))
        if backend.device_type == "cuda":
            monkeypatch.setattr(backend, "unusable", unusable)


def test_flags_accept_both_pattern_spellings_and_boolean_words() -> None:
    for spelling in ("2_8", "6:8", " 2_8 "):
        for true in ("1", "true", "YES"):
            environment = {"USE_CUSPARSELT": true, "SPARSITY": spelling}
            assert Flags.from_environment(environment) == Flags("sparse", SIX_EIGHT)
            assert flags.path_flag(environment) == "USE_CUSPARSELT"
            assert flags.active_names(environment) == ["USE_CUSPARSELT", "SPARSITY"]
            assert flags.disabled({"DISABLE_SLIDESPARSE": true})
    assert Flags.from_environment({}) == Flags.from_environment({"SLIDESPARSE": "auto"}) == Flags()
    assert Flags.from_environment({"SLIDESPARSE": "Require"}) == Flags("sparse")
    assert flags.path_flag({"SLIDESPARSE": "require", "USE_CUSPARSELT": "0"}) == "SLIDESPARSE=require"
    assert flags.disabled({"SLIDESPARSE": "off"})
    assert Flags.from_environment({"SPARSITY": " "}) == Flags()
    for value, expected in (("1", True), ("0", False), (" off ", False), ("", None)):
        assert Flags.from_environment({"SLIDESPARSE_FUSE": value}).fuse is expected
    assert Flags.from_environment({"SLIDESPARSE_PROFILE": "1"}).profile
    assert Flags.from_environment({"USE_CUBLASLT": "1", "USE_CUSPARSELT": "0"}) == Flags("dense")
    for not_true in ("", "0", "ON", "perhaps"):  # torch uses ON; it does not request SlideSparse
        assert flags.path_flag({"USE_CUSPARSELT": not_true}) is None
        assert not flags.disabled({"DISABLE_SLIDESPARSE": not_true})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SPARSITY": "lots"}, ["variable SPARSITY", "'lots' is not a pattern", "6:8", "2_8", "2_inf"]),
        ({"SLIDESPARSE_FUSE": "maybe"}, ["SLIDESPARSE_FUSE='maybe'", "use 1 or 0"]),
        ({"USE_CUSPARSELT": "ON"}, ["USE_CUSPARSELT='ON'", "use 1 or 0"]),
        ({"DISABLE_SLIDESPARSE": "on"}, ["DISABLE_SLIDESPARSE='on'", "use 1 or 0"]),
        ({"SLIDESPARSE_PROFILE": "maybe"}, ["SLIDESPARSE_PROFILE='maybe'", "use 1 or 0"]),
        ({"SLIDESPARSE_BACKEND": "cutlass"}, ["_BACKEND='cutlass': use auto, hopper or cusparselt"]),
        ({"SLIDESPARSE": "1"}, ["SLIDESPARSE='1'", "use off, auto or require"]),
        ({**DENSE, "USE_CUSPARSELT": "1"}, ["both set", "unset one"]),
        ({**DENSE, "SLIDESPARSE": "require"}, ["SLIDESPARSE=require and USE_CUBLASLT are both set"]),
        ({**DENSE, "SLIDESPARSE_BACKEND": "hopper"}, ["USE_CUBLASLT selects", "SLIDESPARSE_BACKEND=hopper"]),
    ],
)
def test_invalid_flag_values_are_refused(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(FlagError) as caught:
        Flags.from_environment(environment)
    for fragment in words:
        assert fragment in str(caught.value)


def test_unknown_variables_are_reported_not_refused() -> None:
    """A mistyped name, or one that Kubernetes sets beside a service called slidesparse."""
    environment = {"SLIDESPARSE_CACHE": "/x", "USE_CUDA": "1", "MY_SLIDESPARSE": ""}
    assert flags.unknown_names(environment) == []
    unknown = {"SLIDESPARSE_FUSED": "1", "SLIDESPARSE_PORT": "tcp://10.0.0.1:8000"}
    assert flags.unknown_names(environment | unknown) == sorted(unknown)
    assert Flags.from_environment(unknown) == Flags()


def test_known_variables_are_those_that_the_code_reads() -> None:
    """Python sources name variables by whole literals; C++ sources read them with getenv."""
    read = {flags.BACKEND, flags.FUSE, flags.PROFILE}
    for path in [
        ROOT / "setup.py",
        *(p for d in ("slidesparse", "vllm_patch", "benchmarks") for p in (ROOT / d).rglob("*.py")),
    ]:
        if path.name != "flags.py":
            literals = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
            read |= {x for x in literals if isinstance(x, str) and re.fullmatch(r"SLIDESPARSE_\w+", x)}
    for path in (ROOT / "csrc").rglob("*.*"):
        read |= set(re.findall(r'getenv\("(SLIDESPARSE_\w+)"', path.read_text()))
    assert read == set(flags.KNOWN)
    assert Flags.from_environment(dict.fromkeys(flags.KNOWN, "")) == Flags()


def test_documented_variables_are_known() -> None:
    folders = [path for name in ("docs", "docker", "vllm_patch", ".ci") for path in (ROOT / name).rglob("*")]
    for path in [ROOT / "Makefile", ROOT / "README.md", *folders]:
        if path.suffix in ("", ".md", ".yml", ".sh") and path.is_file():
            found = re.findall(r"\bSLIDESPARSE_[A-Z_]*[A-Z]\b", path.read_text())
            assert {*found} <= {*flags.KNOWN}, path


def _config(layout: str = "dense") -> dict[str, object]:
    layers = {"layers.0.mlp": LayerEntry(SIX_EIGHT, 64)}
    return {"quant_method": "compressed-tensors", KEY: Metadata(SIX_EIGHT, layout, layers).to_json()}


def test_stamp_round_trip_and_refusal_of_invalid_stamps() -> None:
    resolution = resolve(_config(), Flags(), on_cuda=False)
    assert (resolution.pattern, resolution.path) == ("6:8", "sparse")
    assert (resolution.backend, resolution.layout) == ("reference", "dense")
    config = _config()
    stamp(resolution, [config])
    assert Resolution.of_stamp(config[STAMP]) == resolution
    valid = dict(config[STAMP])  # type: ignore[call-overload]
    for invalid in (None, [], {}, {**valid, "fuse": 1}, {**valid, "backend": None}, {**valid, "more": ""}):
        with pytest.raises(ResolveError, match="slidesparse_serving"):
            Resolution.of_stamp(invalid)


def test_resolve_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch)
    for backend, default in (("hopper", True), ("cusparselt", False)):
        for fuse, expected in ((None, default), (True, True), (False, False)):
            resolution = resolve(_config(), Flags(fuse=fuse, backend=backend), on_cuda=True)
            assert resolution.fuse is expected
    assert resolve(_config(), Flags(), on_cuda=False).fuse is False


def test_sparsity_dense_needs_a_backend_for_dense_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch)
    config = {"quant_method": "compressed-tensors"}
    flags = Flags.from_environment({"USE_CUSPARSELT": "1", "SPARSITY": "Dense"})
    for on_cuda, backend in ((True, "hopper"), (False, "reference")):
        resolution = resolve(config, flags, on_cuda)
        assert (resolution.pattern, resolution.backend, resolution.path) == ("dense", backend, "sparse")
    with pytest.raises(ResolveError, match="SPARSITY=dense needs the backend .* here cusparselt was"):
        resolve(config, replace(flags, backend="cusparselt"), True)
    half = Flags.from_environment({"USE_CUSPARSELT": "1", "SPARSITY": "2:4@50%"})
    with pytest.raises(ResolveError, match=r"2:4@50% cannot be requested: .* set SPARSITY=dense"):
        resolve(config, half, True)
    with pytest.raises(ResolveError, match=r"asks for dense \(nothing pruned\), .* pruned to 6:8"):
        resolve(_config(), flags, True)


def test_resolve_sparse_formats_of_compressed_tensors() -> None:
    """The format sparse-24-bitmask implies 2:4; a flag takes precedence over it."""

    def config(form: str, structure: str) -> dict[str, object]:
        sparsity = {"format": form, "sparsity_structure": structure, "targets": ["Linear"]}
        return {"quant_method": "compressed-tensors", "sparsity_config": sparsity}

    for form, words in (("sparse-bitmask", "stored as sparse-bitmask"), ("dense", "a sparsity_config with")):
        assert words in unread_storage(config(form, "2:4"))

    for request, pattern in ((Flags("sparse"), "2:4"), (Flags("sparse", SlidePattern(8)), "6:8")):
        resolution = resolve(config("sparse-24-bitmask", "2:4"), request, on_cuda=False)
        assert (resolution.pattern, resolution.layout) == (pattern, "packed")
    assert resolve(config("sparse-bitmask", "unstructured"), Flags("sparse"), False).pattern == "dense"
    assert resolve(config("dense", "2:4"), Flags("dense"), on_cuda=False).layout == "dense"
    assert resolve(_config("packed"), Flags("dense"), on_cuda=False).layout == "packed"


def test_unreadable_flag_is_refused_for_what_it_may_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unconverted W8A8 checkpoint; USE_CUSPARSELT=ON may be meant for the build of torch where it means nothing."""
    for flag in ("USE_CUSPARSELT", "USE_CUBLASLT"):
        with monkeypatch.context() as patch:
            patch.setenv(flag, "on")
            with pytest.raises(FlagError, match=f"{flag}='on': use 1 or 0"):
                claim(quantization_config("int8"), None, lambda: ("cpu", None))
            for other in ("awq", "compressed-tensors"):  # the latter without W8A8
                assert claim({"quant_method": other}, None, lambda: ("cpu", None)) is None


def test_unasked_are_unpruned_w8a8_models_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No flag is set, or only one that does not ask for the plugin; another program's SPARSITY has no effect."""
    int8, static = quantization_config("int8"), quantization_config("int8")
    static["config_groups"]["group_0"]["input_activations"]["dynamic"] = False  # type: ignore[index]
    mixed = quantization_config("fp8")
    mixed["config_groups"]["group_0"]["input_activations"]["type"] = "int"  # type: ignore[index]
    strange = {"quant_method": "compressed-tensors", "config_groups": {"a": ["Linear"]}}
    marked = {**int8, "sparsity_config": {"format": "dense", "targets": ["Linear"]}}  # which vLLM refuses
    hopper, ampere, cpu = ("cuda", (9, 0)), ("cuda", (8, 0)), ("cpu", None)

    def backend(config: Any, machine: tuple[str, Any], quantization: str | None = None) -> str | None:
        resolution = claim(config, quantization, lambda: machine)
        assert resolution is None or (resolution.pattern, resolution.asked) == ("dense", False)
        return resolution and resolution.backend

    with_gpu(monkeypatch)
    for variables in ({}, {"SLIDESPARSE": "auto", "SPARSITY": "0.5"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert backend(int8, hopper) == backend(quantization_config("fp8", "tensor"), hopper) == "hopper"
        assert backend(int8, ampere) is backend(int8, cpu) is backend(int8, ("rocm", None)) is None
        assert backend(marked, ampere) == "hopper"  # a simulated Ampere
        assert backend(marked, cpu) == "reference"
        for config in (static, mixed, strange):
            assert backend(config, hopper) is None
        assert backend(int8, hopper, "compressed-tensors") is backend({"quant_method": "awq"}, hopper) is None
    cases = ("reference", cpu, "reference"), ("hopper", cpu, None), ("cusparselt", hopper, None)
    for name, machine, served in cases:
        monkeypatch.setenv("SLIDESPARSE_BACKEND", name)
        assert backend(int8, machine) == served
    monkeypatch.delenv("SLIDESPARSE_BACKEND")
    with_gpu(monkeypatch, hopper="nvcc:\nno memory")
    caplog.clear()
    assert backend(int8, hopper) is backend(int8, hopper) is None  # one line, once
    assert caplog.messages == ["vLLM's own kernels serve this model: hopper cannot run: nvcc: no memory"]
    monkeypatch.setattr(type(gemm.get("hopper")), "unusable", lambda *_: 1 // 0)
    assert backend(int8, hopper) is None


def test_errors_suggest_unsetting_only_flags_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        message = "config.json holds SlideSparse metadata, but|USE_CUSPARSELT is set, but"
        with pytest.raises(ResolveError, match=message) as refused:
            claim({**_config(), "quant_method": "awq"}, None, lambda: ("cpu", None))
        return str(refused.value)

    assert "unset" not in refuse()
    monkeypatch.setenv("USE_CUSPARSELT", "1")
    assert "; or unset USE_CUSPARSELT" in refuse()


# The choice of a path's backend by the flag and the machine


def test_choose_takes_the_preferred_usable_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (gemm.SPARSE, gemm.DENSE):
        assert gemm.choose(path, CPU) == ("reference", "this machine has no CUDA device")
    with_gpu(monkeypatch)
    assert gemm.choose(gemm.SPARSE, CUDA, (9, 0)) == ("hopper", "CUDA device of compute capability 9.0")
    assert gemm.choose(gemm.DENSE, CUDA, (9, 0))[0] == "cublaslt"
    with_gpu(monkeypatch, hopper="nvcc was\nnot found")
    name, reason = gemm.choose(gemm.SPARSE, CUDA, (9, 0))
    assert name == "cusparselt"
    assert "hopper cannot run: nvcc was not found" in reason


def test_backend_flag_overrides_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, cusparselt="no library")
    resolution = resolve({}, Flags("sparse", backend="hopper"), True)
    assert (resolution.backend, resolution.reason) == ("hopper", "SLIDESPARSE_BACKEND=hopper")
    for backend, on_cuda in (("cusparselt", True), ("hopper", False)):
        with pytest.raises(ResolveError, match=f"SLIDESPARSE_BACKEND={backend}: .* cannot run here"):
            resolve({}, Flags("sparse", backend=backend), on_cuda)
