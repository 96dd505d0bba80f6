"""The choice of a path's backend by the flag and the machine."""

from __future__ import annotations

import pytest
import torch
from machines import with_gpu

from slidesparse import gemm
from slidesparse.flags import FlagError, Flags

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_backend_flag_parsing() -> None:
    for value in ("hopper", " Hopper ", "cusparselt", "reference"):
        assert Flags.from_environment({"SLIDESPARSE_BACKEND": value}).backend == value.strip().lower()
    for value in ("", "auto", "AUTO"):
        assert Flags.from_environment({"SLIDESPARSE_BACKEND": value}).backend is None
    with pytest.raises(FlagError, match="SLIDESPARSE_BACKEND='cutlass': use auto, hopper or cusparselt"):
        Flags.from_environment({"SLIDESPARSE_BACKEND": "cutlass"})
    with pytest.raises(
        FlagError, match="USE_CUBLASLT selects the dense path, but SLIDESPARSE_BACKEND=hopper"
    ):
        Flags.from_environment({"SLIDESPARSE_BACKEND": "hopper", "USE_CUBLASLT": "1"})


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


def test_choose_fails_if_no_gpu_backend_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, choose() does not fall back to the reference backend silently."""
    with_gpu(monkeypatch, hopper="no nvcc", cusparselt="no library")
    with pytest.raises(
        gemm.BackendError, match="hopper cannot run: no nvcc; cusparselt cannot run: no library"
    ):
        gemm.choose(gemm.SPARSE, CUDA, (9, 0))


@pytest.mark.vllm
def test_backend_flag_overrides_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse import resolve

    with_gpu(monkeypatch, cusparselt="no library")
    assert resolve._backend("sparse", True, "hopper") == ("hopper", "SLIDESPARSE_BACKEND=hopper")
    for backend, on_cuda in (("cusparselt", True), ("hopper", False)):
        with pytest.raises(resolve.ResolveError, match=f"SLIDESPARSE_BACKEND={backend}: .* cannot run here"):
            resolve._backend("sparse", on_cuda, backend)
