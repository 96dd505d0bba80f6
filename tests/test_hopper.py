"""The Hopper backend without its kernels: what is handed to a launch, refusals."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hopper_stand_in import SMS, StandIn, fit
from hypothesis import given
from hypothesis import strategies as st

from slidesparse import gemm, kernels, nvcc, ops, reference
from slidesparse.gemm import hopper, hopper_format, hopper_native, hopper_plans, plans, tuned
from slidesparse.gemm.hopper_configs import candidates
from slidesparse.gemm.library import Layout, LibraryError, Problem
from slidesparse.gemm.tuned import Subject, Tuned
from slidesparse.pattern import PatternError, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8

pytest_plugins = ("hopper_fixtures",)

CPU = torch.device("cpu")
PROBLEM = Problem("int8", "bf16", 37888, 5376, 64, "both")


STRUCTURES = {
    "Call": (hopper_native.Call, 112),
    "Quantize": (hopper_native.Quantize, 128),
    "Linear": (hopper_native.Linear, 256),
    "Pack": (hopper_native.Pack, 72),
}
KINDS = {"std::int32_t": ctypes.c_int32, "std::int64_t": ctypes.c_int64, "float": ctypes.c_float}
KINDS |= {f"SlidesparseHopper{name}": made for name, (made, _) in STRUCTURES.items()}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_those_of_the_source(name: str) -> None:
    """Names and types in order, and the size that the compiler is made to check."""
    made, size = STRUCTURES[name]
    source = (nvcc.sources() / "interface.cuh").read_text()
    body = re.search(rf"struct SlidesparseHopper{name} {{(.*?)\n}};", source, re.S)
    assert body
    declared = []
    for line in re.sub(r"//.*", "", body[1]).split(";"):
        match = re.fullmatch(r"\s*(?:const )?([\w:]+)\s*(\*?)\s*([\w,\s]+?)\s*", line)
        if match:
            kind = ctypes.c_void_p if match[2] else KINDS[match[1]]
            declared += [(word.strip(), kind) for word in match[3].split(",")]
        else:
            assert not line.strip(), line
    assert list(made._fields_) == declared
    assert ctypes.sizeof(made) == size
    assert f"static_assert(sizeof(SlidesparseHopper{name}) == {size});" in source


def test_functions_and_constants_are_those_of_the_sources() -> None:
    text = "\n".join(path.read_text() for path in nvcc.sources().glob("*.cu*"))
    for name in ("gemm", "stream", "quantize", "linear", "pack", "fit", "workspace", "unusable"):
        assert re.search(rf"\bslidesparse_hopper_{name}\(", text)
    for name, number in {"None": 0, "BFloat16": 1, "Float16": 2, "Float32": 3}.items():
        assert re.search(rf"k{name} = {number}\b", text)
    assert list(hopper_native.FLOATS.values()) == [1, 2, 3]
    for number, name in enumerate(("AtEnd", "AtOnce", "BeforeCodes")):  # off, early, late
        assert re.search(rf"k{name} = {number}\b", text)
    assert hopper_plans.TRIGGERS == ("off", "early", "late")
    assert kernels.LAUNCH_DEPENDENTS in hopper_plans.TRIGGERS
    assert f"kStripRows = {hopper_format.STRIP};" in text
    assert f"kBlockColumns = {hopper_format.BLOCK};" in text
    assert f"kStoreCodes = {hopper_plans.ROW};" in text


@given(st.integers(0, 2**40))
def test_rows_that_products_are_looked_up_with(m: int) -> None:
    rows = hopper.planned_rows(m)
    assert rows >= m
    assert hopper.planned_rows(rows) == rows
    assert rows < 2 * m if 0 < m < 16 else rows == plans.bucket(m)


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 70, 150), (17, 64, 128), (40, 129, 333)])
def test_a_layer_through_a_stand_in(standing_in: StandIn, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Everything that is handed over is what the reference computes with, for every type of output and bias.

    Small whole numbers, so that float32 sums of FP8 codes are exact too: those of x are 64 x, at most 448.
    """
    generator = torch.Generator().manual_seed(m)
    pattern = SlidePattern(8)
    weight = prune(torch.randint(-8, 9, (n, k), generator=generator).float(), pattern).to(dtype)
    packed = gemm.slide_and_pack("hopper", weight, pattern, 0, "layer")
    scale_w = torch.rand(n, 1, generator=generator)
    x = torch.randint(-7, 8, (m, k), generator=generator).float()
    x[:, 0] = 7
    columns = gemm.columns("hopper", pattern.layout(k).slided)
    assert columns % 128 == 0  # as what the copy engine reads at a time
    q, scale_x = ops.quant_slide(x, 8, 0, dtype, columns)
    for out in (torch.bfloat16, torch.float16):
        for bias in (None, torch.randn(n).to(out), torch.randn(n)):
            found = ops.scaled_matmul(q, scale_x, packed, scale_w, bias, out, "hopper")
            plain = ops.quant_slide(x, 4, 0, dtype, k + -k % 4)[0][:, :k]
            sums = reference.matmul(plain, weight)
            expected = reference.dequant_bias(sums, scale_x, scale_w, bias, out, "cuda")
            assert found.shape == (m, n)
            assert torch.equal(found, expected)
    call = standing_in.calls[-1]
    assert (call.m, call.n, call.k, call.stream, call.dependent) == (
        m,
        n,
        columns,
        77,
        hopper_plans.DEPENDENT,
    )
    assert len(plans.plans("hopper", -1)) == 1  # one for all types of outputs and biases


def test_activations_that_the_copy_engine_cannot_read_are_copied(standing_in: StandIn) -> None:
    weight = torch.eye(64, dtype=INT8)
    packed, ones = gemm.provider("hopper").pack(weight), torch.ones(64)
    wide = torch.arange(3 * 100).reshape(3, 100).to(INT8)
    for q in (wide[:, 1:65], wide[:, :64], wide.reshape(-1)[5 : 5 + 128].view(2, 64), wide[:, :50]):
        found = gemm.provider("hopper").scaled_matmul(q, ones, packed, ones.view(64, 1), None, torch.float16)
        assert standing_in.calls[-1].q % 16 == 0
        assert torch.equal(found[:, : q.shape[1]], q.half())


def test_no_tokens_launch_nothing(standing_in: StandIn) -> None:
    provider = gemm.provider("hopper")
    packed = provider.pack(torch.eye(64, dtype=INT8))
    q, ones = torch.zeros(0, 64, dtype=INT8), torch.ones(64, 1)
    found = provider.scaled_matmul(q, torch.ones(0, 1), packed, ones, None, torch.bfloat16)
    assert (found.shape, found.dtype, standing_in.calls) == ((0, 64), torch.bfloat16, [])


def test_the_tuned_configuration_runs_and_others_are_noted(
    standing_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    """K' of 48 columns is looked up as 128, as tuning does; 9 tokens as 16."""
    weight, ones = torch.eye(64, dtype=INT8)[:, :48], torch.ones(64, 1)
    packed = gemm.provider("hopper").pack(weight)
    subject = Subject("hopper", hopper.VERSION, "NVIDIA Test 100", (9, 0))
    problems = [Problem("int8", "bf16", 64, 128, m, "both") for m in (1, 16, 64)]
    names = ["split:1x8/1x1/2", "stream:1x16/2/1", "split:9x9/1x1/1"]
    tuned.save(subject, [(p, Tuned(name, 1.0)) for p, name in zip(problems, names, strict=True)])

    def run(m: int) -> hopper_native.Call:
        q = torch.ones(m, 48, dtype=INT8)
        gemm.provider("hopper").scaled_matmul(q, torch.ones(m, 1), packed, ones, None, torch.float16)
        return standing_in.calls[-1]

    call = run(1)
    assert (call.block_strips, call.tokens, call.sharers, call.splits) == (1, 8, 1, 1)
    assert call.shared_bytes == 113 * 1024
    assert standing_in.grids == []
    assert run(9).tokens == 16
    assert standing_in.grids == [SMS]
    assert run(40).block_strips <= 5
    assert "hopper refuses the algorithm split:9x9/1x1/1 that was tuned" in caplog.text


@pytest.mark.parametrize("n", [2304, 4096])
def test_an_untuned_shape_takes_what_was_tuned_nearby_or_what_the_model_chooses(
    standing_in: StandIn, n: int
) -> None:
    """How to cut K depends on the shape: one with half the out-features is too far."""
    weight, ones = torch.ones(4608, 64, dtype=INT8).tril_(-4544), torch.ones(4608, 1)
    weight[:, 2:] = 0
    subject = Subject("hopper", hopper.VERSION, "NVIDIA Test 100", (9, 0))
    other = Problem("int8", "bf16", n, 128, 16, "both")
    tuned.save(subject, [(other, Tuned("split:1x16/2x1/3", 1.0))])
    q, packed = torch.ones(16, 64, dtype=INT8), gemm.provider("hopper").pack(weight)
    gemm.provider("hopper").scaled_matmul(q, ones[:16], packed, ones, None, torch.float16)
    call, first = standing_in.calls[-1], candidates(4608, 128, 16, SMS, 1, fit)[0]
    found = (call.block_strips, call.tokens, call.sharers, call.splits)
    chosen = (first.strips, first.tokens, first.sharers, first.splits)
    assert chosen != (1, 16, 2, 1)
    assert found == ((1, 16, 2, 1) if n == 4096 else chosen)


def test_what_a_launch_says_is_told(standing_in: StandIn) -> None:
    provider, ones = gemm.provider("hopper"), torch.ones(64, 1)
    packed, q = provider.pack(torch.eye(64, dtype=INT8)), torch.ones(2, 64, dtype=INT8)
    standing_in.error = b"cudaErrorInvalidConfiguration (words)"
    with pytest.raises(LibraryError, match=r"Configuration \(words\), by configuration split:"):
        provider.scaled_matmul(q, ones[:2], packed, ones, None, torch.bfloat16)
    with pytest.raises(LibraryError, match="write bf16 or fp16, asked for torch.float32"):
        provider.scaled_matmul(q, ones[:2], packed, ones, None, torch.float32)
    with pytest.raises(LibraryError, match=r"5120 bytes for products \[2, 256\] .* which takes 10240"):
        provider.scaled_matmul(torch.ones(2, 144, dtype=INT8), ones[:2], packed, ones, None, torch.float16)


def test_models_in_float32_are_refused_at_the_start() -> None:
    with pytest.raises(
        gemm.BackendError, match=r"hopper writes .*, this model computes in torch.float32; serve"
    ):
        gemm.require_output("hopper", torch.float32)
    for backend in gemm.PROVIDERS:
        gemm.require_output(backend, torch.bfloat16)
    for backend in ("cusparselt", "cublaslt", "reference"):
        gemm.require_output(backend, torch.float32)


def test_what_the_library_refuses(standing_in: StandIn) -> None:
    library = hopper.LIBRARY
    refused = [
        (Problem("int8", "int32", 64, 64, 16, "both"), Layout(), "products are .* asked for"),
        (Problem("fp8", "bf16", 64, 64, 16), Layout(), "scale by out-feature and token, asked for fp8"),
        (
            Problem("fp8", "bf16", 64, 64, 16, "both"),
            Layout(weight_k=False),
            "have one layout: weight K-cont",
        ),
    ]
    for problem, layout, words in refused:
        with pytest.raises(LibraryError, match=words):
            library.plan(problem, CPU, None, layout)
        with pytest.raises(LibraryError, match=words):
            library.algorithms(problem, CPU, layout)
    with pytest.raises(PatternError):
        library.pack(torch.ones(64, 64, dtype=INT8))
    with pytest.raises(LibraryError, match="quantize it first"):
        library.pack(torch.ones(64, 64, dtype=torch.int32))
    names = library.algorithms(PROBLEM, CPU)
    assert len(names) == len(set(names)) == hopper.CANDIDATES
    assert library.plan(PROBLEM, CPU).algorithm == names[0]
    assert {name.partition(":")[0] for name in names} == {"split", "stream"}


def test_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    unusable = gemm.provider("hopper").unusable
    assert "needs an NVIDIA GPU" in (unusable(CPU) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, words in (((8, 0), "8.0"), ((10, 0), "10.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        said = unusable(cuda) or ""
        assert "compute capability 9.0 (Hopper) alone" in said
        assert f"this GPU has {words}; use the backend cusparselt" in said
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def missing() -> Path:
        raise nvcc.ToolchainError("nvcc was not found", "install it")

    monkeypatch.setattr(nvcc, "library", missing)
    hopper_native.native.cache_clear()
    assert unusable(cuda) == "the Hopper kernels: nvcc was not found; install it"
    native = SimpleNamespace(slidesparse_hopper_unusable=lambda: b"the driver is for CUDA 12.4")
    monkeypatch.setattr(hopper_native, "native", lambda: native)
    assert unusable(cuda) == "the driver is for CUDA 12.4"
    native.slidesparse_hopper_unusable = lambda: None
    assert unusable(cuda) is None
    monkeypatch.setattr(hopper, "missing_triton", lambda: "Triton is not installed")
    monkeypatch.setattr("slidesparse.gemm.native.missing_triton", lambda: None)
    assert unusable(cuda) == "Triton is not installed"


def test_workspaces_are_made_ahead_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing, zeros = False, torch.zeros
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(64, dtype=dtype))
    workspaces = hopper_plans._Workspaces()
    capturing = True
    with pytest.raises(
        LibraryError, match="while a CUDA graph is being captured; run a product on it before"
    ):
        workspaces.address(0, 1)
    capturing = False
    first = workspaces.address(0, 1)
    assert workspaces.address(0, 1) == first
    capturing = True
    second = workspaces.address(0, 2)
    assert (workspaces.address(0, 1), workspaces.address(0, 2)) == (first, second)
    with pytest.raises(LibraryError, match="captured"):
        workspaces.address(0, 3)
    capturing = False
    third, fourth = workspaces.address(0, 3), workspaces.address(0, 4)
    assert len({first, second, third, fourth}) == 4


def test_workspaces_are_in_no_pool_of_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.use_mem_pool`, as vLLM loads weights with sleep mode, holds for the thread that entered it."""
    zeros, threads = torch.zeros, []

    def noted(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        threads.append(threading.get_ident())
        return zeros(64, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(torch, "zeros", noted)
    hopper_plans._Workspaces().address(0, 1)
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_threads_of_one_stream_share_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second asks while the first, which waits for the GPU, lets other threads run."""
    zeros, second = torch.zeros, []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(64, dtype=dtype))
    workspaces = hopper_plans._Workspaces()
    thread = threading.Thread(target=lambda: second.append(workspaces.address(0, 1)))

    def synchronize(index: int) -> None:
        if thread.ident is None:
            thread.start()
            time.sleep(0.1)  # it found none, and waits for the lock

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    first = workspaces.address(0, 1)
    thread.join()
    assert second == [first] == [workspaces.address(0, 1)]
