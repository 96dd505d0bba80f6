"""The search over memory layouts, with a library and a clock that need no GPU, and its page of the report."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from fake_library import CPU, GPU, FakeClock, FakeLibrary, Ticks, session, times_of
from results import csv, tables
from typer.testing import CliRunner

from slidesparse.bench import machine, measure
from slidesparse.bench.inputs import Inputs
from slidesparse.bench.layout import COLUMNS, WRONG, LayoutBench, product_of, products
from slidesparse.bench.session import Session
from slidesparse.bench.shapes import Layer
from slidesparse.cli import app
from slidesparse.gemm import cublaslt, cusparselt, tuned
from slidesparse.gemm.library import LAYOUTS, TN, Layout, Problem
from slidesparse.report import ReportError, render

LAYERS = [Layer("qkv", 64, 48), Layer("o", 32, 64)]
REFUSED, WEIGHT_N = Layout(False, False, False), Layout(weight_k=False)
TIMES = {"heuristic": 12.0, "slow": 30.0, "good": 10.0, "other": 7.0, "wrong": 1.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tuned.CACHE, str(tmp_path / "cache"))
    tuned._tables.cache_clear()
    return tmp_path / "cache"


def libraries() -> tuple[FakeLibrary, FakeLibrary]:
    """Layouts have the algorithms slow and good, but for two of cuSPARSELt."""
    named: dict[Layout, list[str]] = {layout: ["slow", "good"] for layout in LAYOUTS}
    sparse = named | {REFUSED: [], WEIGHT_N: ["other"]}
    return (
        FakeLibrary("cublaslt", sparse=False, times=dict(TIMES), outs=("int32",), named=dict(named)),
        FakeLibrary("cusparselt", times=dict(TIMES), named=sparse),
    )


def run(folder: Path, found: Session, *both: FakeLibrary, dtypes: tuple[str, ...] = ("int8",)) -> bool:
    return LayoutBench(found, folder).run(products(both, LAYERS, dtypes), [16, 32])


def read(folder: Path) -> list[dict[str, str]]:
    header, *lines = (folder / "layout.csv").read_text().splitlines()
    assert header == (
        "library,dtype,weight,activations,output,M,N,K,taken,heuristic_us,p50_us,algorithm,reason"
    )
    return [dict(zip(COLUMNS, line.split(",", len(COLUMNS) - 1), strict=True)) for line in lines]


def test_a_layout_in_words() -> None:
    assert TN.words == ("K", "K", "N")
    assert REFUSED.words == ("N", "M", "M")
    assert str(Layout(output_n=False)) == "weight K-contiguous, activations K-contiguous, output M-contiguous"
    assert (len(set(LAYOUTS)), LAYOUTS[0]) == (8, TN)


def test_every_layout_of_both_libraries_is_measured(tmp_path: Path, cache: Path) -> None:
    dense, sparse = libraries()
    steps: list[str] = []
    found = session(dense, sparse)
    found.advance = steps.append
    assert run(tmp_path, found, dense, sparse, dtypes=("int8", "fp8"))
    rows = read(tmp_path)
    assert len(rows) == len(steps) == 2 * 2 * 2 * 2 * 8
    words = {"weight": "K", "activations": "K", "output": "N"}
    served = [row for row in rows if words.items() <= row.items()]
    assert len(served) == len(rows) / 8
    assert {(row["taken"], row["algorithm"], row["reason"]) for row in served} == {("yes", "good", "")}
    assert set(times_of(served)) == {10.03}
    assert {row["heuristic_us"] for row in rows if row["taken"] == "yes"} == {"12.070"}
    assert {(row["N"], row["K"]) for row in rows} == {("64", "48"), ("32", "64")}
    # 48 columns at 6:8 are 72 windowed ones, in multiples of 32
    assert {problem.k for problem in sparse.searched if problem.n == 64} == {96}
    assert not cache.exists()  # winners of layouts that serving does not use are no business of it


def test_what_a_library_refuses_is_a_row_with_its_words(tmp_path: Path) -> None:
    dense, sparse = libraries()
    assert run(tmp_path, session(dense, sparse), dense, sparse)
    refused = [row for row in read(tmp_path) if row["taken"] == "no"]
    assert len(refused) == 2 * 2
    for row in refused:
        assert (row["library"], row["weight"], row["activations"], row["output"]) == (
            *("cusparselt", "N", "M", "M"),
        )
        assert (row["heuristic_us"], row["p50_us"], row["algorithm"]) == ("", "", "")
        assert row["reason"].startswith('"NOT_SUPPORTED; int8 [')
        assert row["reason"].endswith('output M-contiguous"')
    other = [row for row in read(tmp_path) if row["algorithm"] == "other"]
    assert {(row["weight"], row["activations"], row["output"]) for row in other} == {("N", "K", "N")}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "".join(layout.words))
def test_a_wrong_product_is_noted_and_not_timed(tmp_path: Path, layout: Layout) -> None:
    """All algorithms of a layout agree with each other, but not with the product."""
    dense, _ = libraries()
    dense.named[layout] = ["wrong"]
    dense.times["heuristic"] = 12.0
    dense_plan = dense.plan

    def plan(
        problem: Problem, device: torch.device, algorithm: str | None = None, layout: Layout = TN
    ) -> object:
        return dense_plan(problem, device, "wrong" if dense.named[layout] == ["wrong"] else algorithm, layout)

    dense.plan = plan  # type: ignore[method-assign,assignment]
    assert run(tmp_path, session(dense), dense)
    wrong = [row for row in read(tmp_path) if row["reason"]]
    assert len(wrong) == 2 * 2
    for row in wrong:
        assert (row["taken"], row["p50_us"], row["heuristic_us"]) == ("yes", "", "")
        assert (row["weight"], row["activations"], row["output"], row["reason"]) == (*layout.words, WRONG)


def test_a_heuristic_that_is_refused_does_not_hide_the_best(tmp_path: Path) -> None:
    dense, _ = libraries()
    dense_plan = dense.plan

    def plan(
        problem: Problem, device: torch.device, algorithm: str | None = None, layout: Layout = TN
    ) -> object:
        return dense_plan(problem, device, algorithm or "refused", layout)

    dense.plan = plan  # type: ignore[method-assign,assignment]
    assert run(tmp_path, session(dense), dense)
    for row in read(tmp_path):
        assert (row["taken"], row["heuristic_us"], row["p50_us"]) == ("yes", "", "10.030")
        assert row["reason"] == "its heuristic is refused: refused is refused"


def test_a_stopped_run_is_continued_without_measuring_twice(tmp_path: Path) -> None:
    dense, sparse = libraries()
    assert not run(tmp_path, session(limit=5.5, now=Ticks()), dense, sparse)
    first = read(tmp_path)
    assert len(first) == 5
    dense.searched.clear()
    assert run(tmp_path, session(dense, sparse), dense, sparse)
    assert read(tmp_path)[:5] == first
    assert len(dense.searched) == 2 * 2 * 8 - 5
    assert run(tmp_path, session(limit=0.0), dense, sparse)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
def test_the_product_in_chunks_is_the_product(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slidesparse.bench.layout.CHUNK", 100)
    inputs = Inputs(CPU, 0)
    x, weight = inputs.weight(dtype, 5, 32, False), inputs.weight(dtype, 11, 32, False)
    expected = (x.double() @ weight.double().t()).float()
    assert torch.equal(product_of(x, weight, torch.float32), expected)


@pytest.mark.parametrize("library", [cublaslt.LIBRARY, cusparselt.LIBRARY], ids=lambda library: library.name)
def test_the_libraries_hand_the_layout_to_the_extension(
    library: cublaslt.Library | cusparselt.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module in place of the extension, that keeps what a plan is asked for."""

    class Native:
        workspace, algorithms = 0, 3
        asked: ClassVar[list[tuple[object, ...]]] = []

        def __init__(self, *arguments: object) -> None:
            self.asked.append(arguments[-2:])

        def heuristics(self, most: int, limit: int) -> list[bytes]:
            return [b"\1"]

        def choose(self, algorithm: bytes) -> None: ...

    class Module:
        Plan = Native
        TYPES = COMPUTE = dict.fromkeys(("int8", "int32", "bf16", "fp32"), 0)

        @staticmethod
        def Layout(*flags: bool) -> tuple[bool, ...]:  # noqa: N802  the name in the extension
            return flags

        @staticmethod
        def Algorithm(*numbers: int) -> tuple[int, ...]:  # noqa: N802
            return numbers

        @staticmethod
        def Epilogue(*values: object) -> tuple[object, ...]:  # noqa: N802
            return values

    class Properties:
        multi_processor_count = 0

    plans = cublaslt.plans
    monkeypatch.setattr(plans, "extension", lambda name: Module)
    monkeypatch.setattr(plans, "handle", lambda name, index: None)
    monkeypatch.setattr(plans, "index_of", lambda device: 0)
    monkeypatch.setattr(plans, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    problem = Problem("int8", library.outputs("int8")[0], 64, 64, 32)
    for layout in LAYOUTS:
        Native.asked.clear()
        assert library.algorithms(problem, CPU, layout)
        assert library.plan(problem, CPU, None, layout).workspace == 0
        flags = (layout.weight_k, layout.activations_k, layout.output_n)
        assert [asked[0] for asked in Native.asked] == [flags, flags]
        assert all(str(layout) in str(asked[1]) for asked in Native.asked)
    Native.asked.clear()
    library.plan(problem, CPU)
    assert Native.asked[0][0] == (True, True, True)


def test_the_command_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, sparse = libraries()
    monkeypatch.setattr(machine, "require_gpu", lambda: GPU)
    monkeypatch.setattr(machine, "require_libraries", lambda gpu, names=(): [dense, sparse])
    monkeypatch.setattr(measure, "CudaClock", lambda device: nullcontext(FakeClock(dense, sparse)))
    command = ["bench", "layout", "--shapes", "64x48,32x64", "--dtype", "int8", "--m", "16,32", "--json"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 2 * 2 * 2 * 8
    conditions = json.loads((tmp_path / "out" / "layout.json").read_text())
    assert (conditions["gpu"], conditions["pattern"]) == (GPU.name, "6:8")
    assert conditions["outputs"] == {"cublaslt int8": "int32", "cusparselt int8": "bf16"}
    assert tmp_path / "out" / "layout.md" in render(tmp_path / "out")
    text = (tmp_path / "out" / "layout.md").read_text()
    (rows,) = tables(text, "cusparselt, INT8 to BF16")
    assert rows[0][:7] == [
        "weight",
        "activations",
        "output",
        "taken",
        "M 16 us",
        "M 16 heuristic us",
        "M 16 ratio",
    ]
    assert rows[1] == ["K", "K", "N", "4 of 4", *["20.06", "24.14", "1.00"] * 2]
    assert rows[5] == ["N", "K", "N", "4 of 4", *["14.06", "24.14", "1.43"] * 2]
    assert rows[8] == ["N", "M", "M", "0 of 4", *["-"] * 6]
    assert (
        "At M 16 N, K, N is the fastest of the 7 that every shape has, 1.43 times as fast as serving's."
        in text
    )
    assert "- N, M, M (4): NOT_SUPPORTED\n" in text
    assert "At M 32 serving's layout is the fastest of the 8 that every shape has." in text
    assert "layout.md" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "command", [["--dtype", "fp4"], ["Qwen9"], ["--m", "0"], ["--shapes", "1"]], ids=" ".join
)
def test_wrong_usage_exits_2(command: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "layout", *command])
    assert (done.exit_code, done.stdout) == (2, "")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "layout"])
    assert (done.exit_code, done.stdout) == (3, "")
    assert "measures an NVIDIA GPU, but torch" in done.stderr
    assert list(tmp_path.iterdir()) == []


def line(layout: str, n: int, own: str, best: str, taken: str = "yes", reason: str = "") -> str:
    return f"cublaslt,int8,{','.join(layout)},64,{n},100,{taken},{own},{best},x,{reason}"


def test_a_sum_needs_every_shape(tmp_path: Path) -> None:
    lines = [
        line("KKN", 1, "9", "8"),
        line("KKN", 2, "19", "12"),
        line("NKN", 1, "5", "4"),
        line("NKN", 2, "", "", "no", "bad | call; at 2"),
        line("KMN", 1, "10", "5"),
        line("KMN", 2, "", "5", "yes", "its heuristic is refused: none"),
    ]
    csv(tmp_path, "layout.csv", COLUMNS, lines)
    render(tmp_path)
    text = (tmp_path / "layout.md").read_text()
    (rows,) = tables(text, "cublaslt, INT8")
    assert rows[1:] == [
        ["K", "K", "N", "2 of 2", "20.00", "28.00", "1.00"],
        ["K", "M", "N", "2 of 2", "10.00", "-", "2.00"],
        ["N", "K", "N", "1 of 2", "-", "-", "-"],
    ]
    assert "At M 64 K, M, N is the fastest of the 2 that every shape has, 2.00 times as fast" in text
    assert "- N, K, N (1): bad \\| call\n" in text
    assert "`layout.json` is not there" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (line("KKM", 1, "1", "1").replace("yes", "maybe"), "taken is 'maybe'; allowed: yes, no"),
        (line("MKN", 1, "1", "1"), "weight is 'M'; allowed: K, N"),
    ],
)
def test_what_cannot_be_understood_is_an_error(tmp_path: Path, bad: str, words: str) -> None:
    csv(tmp_path, "layout.csv", COLUMNS, [bad])
    with pytest.raises(ReportError, match=words):
        render(tmp_path)
