"""The Hopper backend on stand-in kernels: tuned tables of plans, kernel arguments, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hopper_stand_in import StandIn

from slidesparse import gemm
from slidesparse.build.find import ToolchainError
from slidesparse.gemm import tuned
from slidesparse.gemm.backend import TWO_FOUR, LayerSpec
from slidesparse.gemm.hopper import backend as hopper
from slidesparse.gemm.hopper import native
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.problem import ALL_DENSE, Layout, LibraryError, Problem
from slidesparse.gemm.tuned import Subject, Tuned
from slidesparse.quantize import FP8, INT8

pytest_plugins = ("hopper_fixtures",)

CPU = torch.device("cpu")
PROBLEM = Problem("int8", "bf16", 37888, 5376, 64, "both")
SUBJECT = Subject("hopper", hopper.VERSION, "NVIDIA Test 100", (9, 0))
BACKEND = Hopper()


def identity(columns: int = 64) -> torch.Tensor:
    """Return a packed identity matrix [64, columns]."""
    spec = LayerSpec(64, columns, TWO_FOUR, 0, INT8, torch.bfloat16)
    return BACKEND.pack(spec, torch.eye(64, dtype=INT8)[:, :columns].contiguous())


def run(m: int, columns: int = 64) -> torch.Tensor:
    """Multiply ones by `identity`."""
    q, ones = torch.ones(m, columns, dtype=INT8), torch.ones(64, 1)
    return BACKEND.scaled_matmul(q, torch.ones(m, 1), identity(columns), ones, None, torch.float16)


def test_plan_runs_the_tuned_configuration_of_each_token_count(
    standing_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    """K' of 48 columns is looked up as 128; far above the tuned token counts, the last configuration runs."""
    names = {1: "split:1x8/1x1/2", 16: "stream:1x16/2/1", 64: "split:9x9/1x1/1"}
    names |= dict.fromkeys((512, 4096, 16384), "stream:2x256/2/1")  # each serves down to an eighth of it
    tuned.save(
        SUBJECT,
        [(Problem("int8", "bf16", 64, 128, m, "both"), Tuned(name, 1.0)) for m, name in names.items()],
    )
    for m, expected in (
        (1, names[1]),
        (2, names[16]),
        (16, names[16]),
        (17, standing_in.candidates[0]),  # the configuration for 64 tokens is refused and logged
        (64, standing_in.candidates[0]),
        (65, names[512]),
        (40000, names[512]),
    ):
        run(m, 48)
        assert standing_in.calls[-1] == (expected, m, 77)
    assert "refuses the algorithm split:9x9/1x1/1" in caplog.text
    assert "no tuned algorithm" not in caplog.text
    assert len(standing_in.served) == 1  # one plan for all token counts


def test_dense_blocks_run_their_own_tuned_configuration(standing_in: StandIn) -> None:
    """Above the tuned token counts and without tuning, dense blocks run the configuration of 2:4 weights."""
    sparse, dense = "split:1x16/2x1/3", "split:1x16/1x2/2"
    problem = Problem("int8", "bf16", 64, 256, 16, "both")
    tuned.save(
        SUBJECT,
        [
            (replace(problem, m=64), Tuned(sparse, 1.0)),
            (replace(problem, blocks=ALL_DENSE), Tuned(dense, 1.0)),
        ],
    )
    dense_codes, sparse_codes = (
        torch.ones(64, 256, dtype=INT8),
        (torch.arange(256) % 4 < 2).to(INT8).expand(64, -1),
    )
    half = torch.cat((dense_codes[:, :128], sparse_codes[:, 128:]), 1)
    spec, ones = LayerSpec(64, 256, None, 0, INT8, torch.bfloat16), torch.ones(64, 1)
    for weight, m, expected in (
        (dense_codes, 16, dense),
        (dense_codes, 32, sparse),
        (half, 16, sparse),
        (sparse_codes.contiguous(), 16, sparse),
    ):
        q = torch.ones(m, 256, dtype=INT8)
        BACKEND.scaled_matmul(q, torch.ones(m, 1), BACKEND.pack(spec, weight), ones, None, torch.float16)
        assert standing_in.calls[-1] == (expected, m, 77)
    slid = native.Layer(64, 192, 6, 0, False, 256)  # as many columns, but no dense block
    assert all(len(set(row)) == 1 for _, row in BACKEND._configuration_table(slid, CPU))


@pytest.mark.parametrize(
    ("n", "tuned_for_it", "expected"),
    [
        (4096, "stream:3x128/2/1", "stream:3x128/2/1"),  # predicted to be 5% slower than the best
        (2048, "stream:3x128/2/1", "split:2x64/1x4/2"),  # too far
        (4096, "split:1x16/2x1/3", "split:2x64/1x4/2"),  # not a candidate for this shape
        (4096, "split:1x8/1x1/1", "stream:1x256/1/1"),  # predicted to be 15% slower: the next shape's
    ],
)
def test_untuned_shape_uses_nearby_or_predicted_configuration(
    standing_in: StandIn, caplog: pytest.LogCaptureFixture, n: int, tuned_for_it: str, expected: str
) -> None:
    """The split of K depends on the shape, so what serves a near one may be slow."""
    tuned.note_untuned.cache_clear()
    others = "stream:1x256/1/1", "split:1x8/1x1/1"
    if expected in others:
        standing_in.candidates += others
        tuned.save(SUBJECT, [(Problem("int8", "bf16", n - 1024, 128, 16, "both"), Tuned(expected, 1.0))])
    tuned.save(SUBJECT, [(Problem("int8", "bf16", n, 128, 16, "both"), Tuned(tuned_for_it, 1.0))])
    weight, ones = torch.zeros(4608, 64, dtype=INT8), torch.ones(4608, 1)
    packed = BACKEND.pack(LayerSpec(4608, 64, TWO_FOUR, 0, INT8, torch.bfloat16), weight)
    for m in (16, 4000):
        q = torch.ones(m, 64, dtype=INT8)
        BACKEND.scaled_matmul(q, torch.ones(m, 1), packed, ones, None, torch.float16)
    assert [call[0] for call in standing_in.calls] == [expected, standing_in.candidates[0]]
    assert "hopper has no tuned algorithm for int8 weights [4608, 128]" in caplog.text


def test_no_plan_is_made_during_graph_capture(standing_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made earlier serves any number of tokens."""
    run(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(1000)
    with pytest.raises(LibraryError, match="captured; run the layer once before"):
        BACKEND.quantize(torch.ones(1, 64), 8, 0, INT8, 128)


def test_activations_unreadable_by_tma_are_copied(standing_in: StandIn) -> None:
    """The stand-in kernels refuse such activations."""
    packed, ones = identity(), torch.ones(64)
    wide = torch.arange(3 * 100).reshape(3, 100).to(INT8)
    for q in (wide[:, 1:65], wide[:, :64], wide.reshape(-1)[5 : 5 + 128].view(2, 64), wide[:, :50]):
        output = BACKEND.scaled_matmul(q, ones, packed, ones.view(64, 1), None, torch.float16)
        assert torch.equal(output[:, : q.shape[1]], q.half())


def test_no_tokens_launch_nothing(standing_in: StandIn) -> None:
    output = run(0)
    assert (output.shape, output.dtype, standing_in.calls) == ((0, 64), torch.float16, [])


def test_launch_errors_are_raised(standing_in: StandIn) -> None:
    packed, ones = identity(), torch.ones(64, 1)
    q = torch.ones(2, 64, dtype=INT8)
    standing_in.error = b"the kernels' words"
    with pytest.raises(LibraryError, match="the kernels' words"):
        BACKEND.scaled_matmul(q, ones[:2], packed, ones, None, torch.bfloat16)
    with pytest.raises(LibraryError, match=r"torch\.float32"):
        BACKEND.scaled_matmul(q, ones[:2], packed, ones, None, torch.float32)
    with pytest.raises(LibraryError, match="5120 bytes .* 10240"):
        BACKEND.scaled_matmul(torch.ones(2, 144, dtype=INT8), ones[:2], packed, ones, None, torch.float16)


def test_plan_and_algorithms_refuse_unsupported_problems(standing_in: StandIn) -> None:
    refused = [
        (Problem("int8", "int32", 64, 64, 16, "both"), Layout(), "int32"),
        (Problem("fp8", "bf16", 64, 64, 16), Layout(), "scale by out-feature and token"),
        (Problem("fp8", "bf16", 64, 64, 16, "both"), Layout(weight_k=False), "one layout"),
    ]
    for problem, layout, message in refused:
        with pytest.raises(LibraryError, match=message):
            BACKEND.plan(problem, CPU, None, layout)
        with pytest.raises(LibraryError, match=message):
            BACKEND.algorithms(problem, CPU, layout)
    with pytest.raises(LibraryError, match=r"torch\.int32"):
        BACKEND.operand(torch.ones(64, 64, dtype=torch.int32))
    with pytest.raises(LibraryError, match="split:9x9/1x1/1"):
        BACKEND.plan(PROBLEM, CPU, "split:9x9/1x1/1")
    assert BACKEND.algorithms(PROBLEM, CPU) == list(standing_in.candidates)
    assert BACKEND.plan(PROBLEM, CPU).algorithm == standing_in.candidates[0]


def test_unreferenced_plans_are_destroyed(standing_in: StandIn) -> None:
    plan = BACKEND.plan(PROBLEM, CPU)
    assert len(standing_in.plans) == 1
    del plan
    assert standing_in.plans == {}
    assert standing_in.served == {}


def test_unusable_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert "needs an NVIDIA GPU" in (BACKEND.unusable(CPU) or "")
    for capability in ((8, 0), (10, 0)):
        assert "need compute capability 9.0 (Hopper)" in (
            BACKEND.unusable_library(capability, loads=True) or ""
        )

    def missing(name: str) -> Path:
        raise ToolchainError("nvcc was not found", "install it")

    for module in (native, hopper.cuda):
        monkeypatch.setattr(module, "build", missing)
    native.library.cache_clear()
    for loads in (True, False):
        assert "nvcc was not found; install it" in (BACKEND.unusable_library((9, 0), loads) or "")
    library = StandIn(missing=b"the driver is for CUDA 12.4")
    monkeypatch.setattr(native, "library", lambda: library)
    assert BACKEND.unusable_library((9, 0), loads=True) == "the driver is for CUDA 12.4"
    library.missing = None
    assert BACKEND.unusable_library((9, 0), loads=True) is None
    assert "CPU build" in (BACKEND.unusable(cuda, (9, 0)) or "") or torch.version.cuda


def test_float32_models_are_refused() -> None:
    from slidesparse.gemm.backend import require_output

    with pytest.raises(gemm.BackendError, match=r"hopper .* torch\.float32"):
        require_output("hopper", torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        require_output("hopper", dtype)


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_int8_and_fp8_have_separate_plans(standing_in: StandIn, dtype: torch.dtype) -> None:
    weight = torch.eye(64).to(dtype)
    packed = BACKEND.pack(LayerSpec(64, 64, TWO_FOUR, 0, dtype, torch.bfloat16), weight)
    q = torch.ones(3, 64).to(dtype)
    output = BACKEND.scaled_matmul(q, torch.ones(3, 1), packed, torch.ones(64, 1), None, torch.float16)
    assert torch.equal(output, torch.ones(3, 64).half())
    assert [layer.fp8 for _, layer in standing_in.served] == [dtype == FP8]
