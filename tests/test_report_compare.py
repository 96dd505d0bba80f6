"""The comparison with a reference folder, of small files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from results import FOUR, csv, four, tables

from slidesparse.report import render
from slidesparse.report.compare import Pair, counts, normalized
from slidesparse.report.data import KERNEL_COLUMNS


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables alone."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def compared(tmp_path: Path) -> tuple[Path, Path]:
    """Ours: 6:8 at 1.25 (M 64) and 1.10 (M 512) over cuBLASLt; INT8-writing cuBLASLt takes 88 of its 100 us."""
    ours, reference = tmp_path / "ours", tmp_path / "reference"
    lines = [
        *four("Llama3.2-1B", "dense", 64, "cublaslt", 100),
        *four("Llama3.2-1B", "dense", 64, "cublaslt-int8", 88),
        *four("Llama3.2-1B", "6:8", 64, "cusparselt", 80),
        *four("Llama3.2-1B", "dense", 512, "cublaslt", 110),
        *four("Llama3.2-1B", "6:8", 512, "cusparselt", 100),
        *four("Llama3.2-1B", "dense", 4096, "cublaslt", 100),
    ]
    csv(ours, "kernel.csv", KERNEL_COLUMNS, lines)
    reference.mkdir()
    return ours, reference


def test_beside_the_totals_of_a_reference(compared: tuple[Path, Path]) -> None:
    ours, reference = compared
    csv(
        reference,
        "kernel_model_total.csv",
        ("model", "dtype", "backend", "sparsity", "M", "latency_us_sum4layers", "speedup_vs_cublaslt"),
        [
            *(f"meta/Llama-3.2-1B,INT8,cublaslt,dense,{m},120,1.0" for m in (64, 512, 4096)),
            "meta/Llama-3.2-1B,INT8,cusparselt,2_8,64,100,1.2",
            "meta/Llama-3.2-1B,INT8,cusparselt,2_8,512,96,1.25",
            "meta/Llama-3.2-1B,INT8,cusparselt,2_8,4096,120,1.0",
            "meta/Llama-3.2-1B,INT8,cusparselt,2_8,128,1,120",  # an M that is not compared
        ],
    )
    assert ours / "comparison.md" in render(ours, reference)
    text = (ours / "comparison.md").read_text()
    over_cublaslt, over_int8, layers = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert (
        "Ours is at least theirs in 1 of 2 cells; 1 more were measured only there, 0 only here."
        in over_cublaslt
    )
    assert tables(over_cublaslt, "Llama3.2-1B, INT8")[0] == [
        ["M", "6:8"],
        ["64", "1.250 ≥ 1.200"],
        ["512", "**1.100 < 1.250**"],
        ["4096", "- / 1.000"],
        ["16384", "- / -"],
    ]
    assert "### Qwen2.5-7B, INT8\n\nNot measured here." in over_cublaslt
    assert "0 of 1 cells" in over_int8  # 88 / 80 = 1.1
    assert "FP8" not in over_int8
    assert "The reference has no such measurements." in layers
    assert "Reference: `e2e_algsearch_layers.csv` is not there." in (ours / "README.md").read_text()


def test_beside_the_layers_of_a_reference(compared: tuple[Path, Path]) -> None:
    """The fastest algorithm of each layer; three layers are no sum; lines of no layer do not count."""
    ours, reference = compared
    head = (
        "model,dtype,backend,gemm_out_dtype,layer,sparsity,M,N,K_gemm,latency_us,alg_id,split_k,n_algs_tried"
    )

    def lines(backend: str, pattern: str, m: int, us: float, names: Iterable[str] = FOUR) -> list[str]:
        return [f"Llama3.2-1B,INT8,{backend},BF16,{n},{pattern},{m},1,1,{us},1,1,1" for n in names]

    csv(
        reference,
        "e2e_algsearch_layers.csv",
        head.split(","),
        [
            *lines("cublaslt", "dense", 64, 40),
            *lines("cublaslt", "dense", 64, 30),
            *lines("cublaslt", "", 64, 1, ("", "")),
            *lines("cusparselt", "2_8", 64, 25),
            *lines("cublaslt", "dense", 512, 40),
            *lines("cusparselt", "2_8", 512, 20, FOUR[:3]),
            *lines("cublaslt", "dense", 256, 40),
        ],
    )
    render(ours, reference)
    text = (ours / "comparison.md").read_text().rsplit("## Results of the types", 1)[1]
    assert "Ours is at least theirs in 1 of 1 cells; 0 more were measured only there, 1 only here." in text
    assert tables(text, "Llama3.2-1B, INT8")[0][1:] == [["64", "1.250 ≥ 1.200"], ["512", "1.100 / -"]]


def test_equal_counts_as_reached_and_half_a_pair_does_not() -> None:
    pairs = [Pair(1.2, 1.2), Pair(1.1, 1.2), Pair(None, 1.2), Pair(1.2, None), Pair(None, None)]
    assert counts(pairs) == (
        "Ours is at least theirs in 1 of 2 cells; 1 more were measured only there, 1 only here."
    )


def test_names_of_models() -> None:
    assert normalized("meta-llama/Llama-3.2-1B") == normalized("Llama3.2-1B") != normalized("Llama3.2-3B")
