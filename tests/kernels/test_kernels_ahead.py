"""Compilation of the Triton kernels to cubins for every generation of GPUs, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton, which comes with torch and vLLM, is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402

from slidesparse.kernels import Config, common  # noqa: E402
from slidesparse.kernels.dequant_bias import dequant_bias  # noqa: E402
from slidesparse.kernels.quant_slide import quant_slide  # noqa: E402
from slidesparse.kernels.slide_weight import slide_weight  # noqa: E402
from slidesparse.quantize import FP8, INT8  # noqa: E402

if common.is_interpreted():
    pytest.skip("TRITON_INTERPRET is set: kernels are not compiled", allow_module_level=True)


def missing_ptxas(target: int) -> str | None:
    """Return the reason why nothing can be assembled for a target, or None."""
    from triton import knobs

    name = "ptxas" if target < 90 else "ptxas_blackwell"
    try:
        ptxas = getattr(knobs.nvidia, name, None) or knobs.nvidia.ptxas
        return None if Path(ptxas.path).is_file() else f"{ptxas.path} is missing"
    except (AttributeError, RuntimeError) as error:
        return f"Triton has no ptxas: {error}"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], list[Any]]:
    """Return a function that makes launches only compile for a target, and returns the list of compiled kernels."""

    def compile_for(target: int) -> list[Any]:
        kernels: list[Any] = []
        run = triton.runtime.JITFunction.run

        def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            kernels.append(run(kernel, *arguments, grid=grid, warmup=True, **options))

        driver = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", target, 32),
            get_current_device=lambda: str(tmp_path),  # ignores kernels compiled for other targets
            get_current_stream=lambda _: 0,
        )
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
        monkeypatch.setattr(triton.runtime.JITFunction, "run", compile_only)
        monkeypatch.setattr(common, "_capability", lambda _: divmod(target, 10))
        monkeypatch.setattr(common, "require", lambda *_: None)  # would refuse tensors on the CPU
        return kernels

    return compile_for


@pytest.mark.parametrize("target", [80, 89, 90, 100, 120])
def test_kernels_compile_for_every_gpu_generation(target: int, compiled: Callable[[int], list[Any]]) -> None:
    if missing := missing_ptxas(target):
        pytest.skip(missing)
    kernels = compiled(target)
    x, vector = torch.zeros(4, 2048, dtype=torch.bfloat16), torch.ones(2048)
    for dtype in INT8, FP8:
        quant_slide(x, 4, 0, dtype)
        quant_slide(x, 8, 0, dtype)
        slide_weight(torch.zeros(8, 64, dtype=dtype), 8, 0, torch.empty(8, 96, dtype=dtype))
    dequant_bias(x.int(), vector[:4], vector, vector.bfloat16(), torch.bfloat16)
    dequant_bias(x.float(), vector[:4], vector, None, torch.float16)
    assert len(kernels) == 8
    for kernel in kernels:
        assert kernel.metadata.target.arch == target
        assert f".target sm_{target}" in kernel.asm["ptx"]
        assert kernel.asm["cubin"].startswith(b"\x7fELF")
    quantizing = [kernel.asm["ptx"] for kernel in kernels if "quant_slide" in kernel.metadata.name]
    converts = ["cvt.rn.satfinite.e4m3x2.f32" in ptx for ptx in quantizing]
    assert converts == [False, False, target >= 89, target >= 89]
    assert all(("griddepcontrol" in ptx) == (target >= 90) for ptx in quantizing)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_long_rows_use_one_barrier_for_their_maximum(
    dtype: torch.dtype, compiled: Callable[[int], list[Any]]
) -> None:
    """With a maximum in each step, its loads would wait for all warps of the step before."""
    if missing := missing_ptxas(90):
        pytest.skip(missing)
    kernels = compiled(90)
    x = torch.zeros(2, 18944, dtype=torch.bfloat16)
    for block in (1024, 8192):  # words of four elements: five steps, and one
        quant_slide(x, 4, 0, dtype, launch=Config(block, 1, 8))
    for block in (1024, 16384):
        quant_slide(x, 8, 0, dtype, launch=Config(block, 1, 8))
    quant, quant_at_once, slide, slide_at_once = (kernel.asm["ptx"].count("bar.sync") for kernel in kernels)
    assert (quant, slide) == (quant_at_once, slide_at_once)
