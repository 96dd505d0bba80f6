"""SLIDESPARSE_KEEP_DENSE: layers that hold both weights, and take the one that was measured to be faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QWEN, converted, write_w8a8
from test_ops import DTYPES, layer
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from zygote import Request, Zygote

from slidesparse import gemm, ops
from slidesparse.flags import FlagError, Flags
from slidesparse.gemm import crossover
from slidesparse.gemm.library import LibraryError
from slidesparse.quantize import FP8, INT8
from vllm_patch.resolve import ResolveError, resolve

N, K = 13, 76


@pytest.fixture
def dense_from_256(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the dense weight of every shape had been measured to be faster for 256 tokens and more, but not 512."""
    chosen = frozenset(m for m in crossover.TOKENS if m >= 256 and m != 512)

    class Everywhere(dict[crossover.Shape, frozenset[int]]):
        def get(self, *_: object) -> frozenset[int]:  # type: ignore[override]
            return chosen

    monkeypatch.setattr(crossover, "_dense", Everywhere())


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        (1, False),
        (128, False),
        (129, True),
        (256, True),
        (257, False),
        (512, False),
        (513, True),
        (70000, True),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_follows_the_tokens(
    dense_from_256: None, dtype: torch.dtype, m: int, expected: bool
) -> None:
    """The dense weight here is not the sparse one's, so the result says which was taken."""
    layout, slided, scale, weight = layer("6:8", dtype, N, K)
    other = weight.view(INT8).flip(0).contiguous().view(dtype)
    x = torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(torch.bfloat16)
    arguments = layout.length, layout.phase, dtype, layout.slided, "reference"
    found = ops.linear(x, slided, scale, None, *arguments, other, "reference")
    sparse = ops.linear(x, slided, scale, None, *arguments)
    dense = ops.dense_linear(x, other, scale, None, dtype, x.dtype, "reference")
    assert not torch.equal(sparse, dense)
    assert torch.equal(found, dense if expected else sparse)


def test_both_weights_give_the_same_bits(dense_from_256: None) -> None:
    """INT8 sums are exact, and the rest of the two ways is the same."""
    layout, slided, scale, weight = layer("6:8", INT8, N, K)
    x = torch.randn(300, K).to(torch.bfloat16)
    bias = torch.linspace(-1, 1, N).to(torch.bfloat16)
    arguments = layout.length, layout.phase, INT8, layout.slided, "reference"
    both = ops.linear(x, slided, scale, bias, *arguments, weight, "reference")
    assert both.any()
    assert torch.equal(both, ops.linear(x, slided, scale, bias, *arguments))


def test_a_shape_that_was_not_measured_stays_sparse() -> None:
    shape = crossover.Shape(0, INT8, N, K, 2 * K, "a test's")
    assert crossover.measured(shape) is None
    assert not crossover.prefers_dense(shape, 4096)


@pytest.mark.parametrize(
    "other",
    [{}, {"dtype": FP8}, {"n": N + 1}, {"k": K + 4}, {"columns": 4}, {"backend": "a test's"}],
    ids=str,
)
def test_a_layer_asks_for_its_own_shape(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured of a shape counts for the layers that have it, and for no others."""
    layout, slided, scale, weight = layer("6:8", INT8, N, K)
    shape = crossover.Shape.of(scale, K, INT8, layout.slided, "reference")._replace(**other)
    monkeypatch.setattr(crossover, "_dense", {shape: frozenset(crossover.TOKENS)})
    x, arguments = torch.randn(3, K), (layout.length, layout.phase, INT8, layout.slided, "reference")
    found = ops.linear(x, slided, scale, None, *arguments, weight.flip(0).contiguous(), "reference")
    assert torch.equal(found, ops.linear(x, slided, scale, None, *arguments)) == bool(other)


def test_one_graph_serves_every_number_of_tokens(dense_from_256: None) -> None:
    layout, slided, scale, weight = layer("4:6", INT8, N, K)
    arguments = layout.length, layout.phase, INT8, layout.slided, "reference"

    def run(x: Tensor) -> Tensor:
        return ops.linear(x, slided, scale, None, *arguments, weight, "reference") * 2

    counter = CompileCounter()
    compiled = torch.compile(run, backend=counter, dynamic=True, fullgraph=True)
    for m in (2, 130, 300):
        x = torch.randn(m, K)
        assert torch.equal(compiled(x), run(x))
    assert counter.frame_count == 1


def test_opcheck() -> None:
    layout, slided, scale, weight = layer("6:8", INT8, N, K)
    words = layout.length, layout.phase, INT8, layout.slided, torch.float32, "reference", "reference"
    torch.library.opcheck(
        torch.ops.slidesparse.sparse_or_dense.default,
        (torch.randn(5, K), slided, weight, scale, None, *words),
    )


def test_the_flag() -> None:
    assert Flags.from_environment({"SLIDESPARSE_KEEP_DENSE": "1"}).keep_dense
    assert not Flags.from_environment({}).keep_dense
    with pytest.raises(FlagError, match="USE_CUBLASLT has no sparse one"):
        Flags.from_environment({"SLIDESPARSE_KEEP_DENSE": "1", "USE_CUBLASLT": "1"})


def test_slided_checkpoints_hold_nothing_to_keep() -> None:
    config = {"quant_method": "slidesparse", "slidesparse": metadata("slided")}
    with pytest.raises(ResolveError, match="convert with --layout dense"):
        resolve(config, Flags(keep_dense=True), on_cuda=False)
    config = {"quant_method": "slidesparse", "slidesparse": metadata("dense")}
    assert resolve(config, Flags(keep_dense=True), on_cuda=False).keep_dense


def metadata(layout: str) -> dict[str, object]:
    from slidesparse.metadata import Metadata
    from slidesparse.pattern import SlidePattern

    return Metadata(SlidePattern(8), layout, {}).to_json()


@pytest.mark.vllm
def test_serving(zygote: Zygote, tmp_path: Path) -> None:
    """The same tokens, from layers with two weights."""
    model = str(converted(write_w8a8(QWEN, tmp_path / "model"), tmp_path / "pruned", "6:8", "dense"))
    alone, both = (zygote.ask(Request(model, env=env)) for env in ({}, {"SLIDESPARSE_KEEP_DENSE": "1"}))
    assert both.summary.endswith("; dense weights kept beside"), both.error + both.summary
    assert not alone.summary.endswith("kept beside")
    assert both.tokens == alone.tokens


def test_stock_kernels_refuse_odd_out_features() -> None:
    with pytest.raises(LibraryError, match="multiple of 16, found 13"):
        gemm.provider("stock").pack(torch.zeros(13, 32, dtype=INT8))


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["2:4", "6:8"])
@pytest.mark.parametrize("backend", ["cusparselt", "hopper"])
def test_measuring_on_a_gpu(backend: str, pattern: str) -> None:
    """Few tokens stay sparse at 2:4, whose weight has half the bytes.  Dense by cuBLASLt, which needs no vLLM."""
    from gpu_layers import layer as gpu_layer

    made = gpu_layer(backend, pattern, INT8, 16384, 4096)
    dense = gemm.provider("cublaslt").pack(made.weight)
    words = made.layout.length, made.layout.phase, INT8, made.columns, torch.bfloat16, backend
    shape = crossover.Shape.of(made.scale, 4096, INT8, made.columns, backend)
    found = crossover.measure(
        shape,
        torch.bfloat16,
        lambda x: ops.sparse_linear(x, made.packed, made.scale, None, *words),
        lambda x: ops.dense_linear(x, dense, made.scale, None, INT8, torch.bfloat16, "cublaslt"),
    )
    print(f"{backend} {pattern}: dense for {sorted(found)} tokens")
    assert crossover.measured(shape) == found
    assert found <= set(crossover.TOKENS)
    if pattern == "2:4":
        assert not found & {32, 64, 128}


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("m", [1, 100, 1000])
def test_stock_kernels_give_the_hopper_kernels_bits(m: int) -> None:
    import vllm._custom_ops  # noqa: F401  registers vLLM's kernels
    from gpu_layers import layer as gpu_layer
    from gpu_layers import normal

    made = gpu_layer("hopper", "6:8", INT8, 512, 1024)
    x, bias = normal(m, 1024, m), normal(1, 512, 7)[0]
    dense = gemm.provider("stock").pack(made.weight)
    found = ops.dense_linear(x, dense, made.scale, bias, INT8, x.dtype, "stock")
    assert torch.equal(found, made.linear(x, bias))
