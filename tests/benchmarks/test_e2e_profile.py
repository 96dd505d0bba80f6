"""Times of a step's kernels from a trace of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import e2e_profile


def trace(folder: Path, events: list[dict[str, object]]) -> None:
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / "rank0.1.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)


def event(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, object]:
    return {"name": name, "cat": category, "ts": start, "dur": duration}


def test_step_time_is_split_into_kernels_and_idle(tmp_path: Path) -> None:
    """Two steps take 50 us each: kernels of 10 and 20 us that overlap by 5 us, and 25 us without a kernel."""
    events: list[dict[str, object]] = [event("aten::mm", 0, 1000, "cpu_op")]
    for start in (100, 150):
        events += [event("_quant_slide", start, 10), event("cutlass::device_kernel<x>", start + 5, 20)]
    events.append(event("Memset (Device)", 199, 1, "gpu_memset"))
    trace(tmp_path, events)
    kernels = {kernel.name: kernel for kernel in e2e_profile.read(tmp_path, steps=2)}
    assert kernels["_quant_slide"] == e2e_profile.Kernel("_quant_slide", "quantize", 1, 10)
    assert kernels["cutlass::device_kernel<x>"].us == 20
    assert kernels["Memset (Device)"].calls == 0.5
    assert kernels["idle"].us == (100 - 2 * 25 - 1) / 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_quant_only_kernel", "quantize"),
        ("void vllm::dynamic_scaled_int8_quant_kernel<c10::BFloat16>", "quantize"),
        ("_dequant_bias_kernel", "scale"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("nvjet_tst_128x64", "product"),
        ("void slidesparse::hopper::GemmStream<slidesparse::hopper::Fp8, 3, 64>(Arguments)", "product"),
        ("void slidesparse::hopper::Quantize<(Float)1, false, true, 2>(QuantizeArguments)", "quantize"),
        ("triton_red_fused_2", "norm and activation"),
        ("triton_poi_fused_dynamic_scaled_int8_quant_mul_silu_slice_1", "norm and activation"),
        ("void at::native::vectorized_elementwise_kernel", "sampling and the rest"),
    ],
)
def test_kernels_are_classified_by_name(name: str, kind: str) -> None:
    assert e2e_profile.kind(name) == kind


def test_missing_or_invalid_trace_is_an_error(tmp_path: Path) -> None:
    for make in (
        lambda: None,
        lambda: trace(tmp_path, [event("aten::mm", 0, 1, "cpu_op")]),
        lambda: (tmp_path / "later.json").write_text("{"),
    ):
        make()
        with pytest.raises(e2e_profile.ProfileError, match=str(tmp_path)):
            e2e_profile.read(tmp_path)
