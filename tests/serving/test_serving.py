"""Small models served sparse in real vLLM give the results of stock vLLM on the same checkpoint.

INT8 is compared token for token.  In float32 the plugin's layers equal stock vLLM's bit for bit (exact accumulators,
the same rounding of activations, the same order of scales and bias), so the tokens must be equal, not close.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from architectures import DECODERS
from checkpoints import convert, converted, edit_block, rewrite, tensors_of
from edits import SPARSE_FLAGS, edited
from engines import STOCK, Answer, Engines, Request
from models import LLAMA, QWEN, Decoder, shrink_codes, write_float, write_w8a8
from packed import packed
from tiny import tiny
from tool_sources import compressed
from torch import Tensor

from slidesparse.checkpoint.metadata import KEY, LayerEntry, Metadata
from slidesparse.evaluate.engine import summaries
from slidesparse.pattern import SlidePattern, parse_pattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8

pytestmark = pytest.mark.vllm

PATTERNS = ["2:4", "4:6", "14:16", "2_inf"]  # tests/kernels/test_ops.py has more
FAMILIES = [pytest.param(QWEN, id="qwen2"), pytest.param(LLAMA, id="llama")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the module's checkpoints; each is made at its first use."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def source(store: Path) -> Path:
    return write_w8a8(QWEN, store / "qwen2-int8")


def checkpoint(store: Path, model: Decoder, pattern: str, layout: str = "dense", quant: str = "int8") -> str:
    source = store / f"{model.model_type}-{quant}"
    if not source.exists():
        write_w8a8(model, source, quant)
    out = store / f"{model.model_type}-{quant}-{pattern.replace(':', '_')}-{layout}"
    return str(out if out.exists() else converted(source, out, pattern, layout))


@cache
def served(engines: Engines, model: str, settings: str) -> Answer:
    """Serve a model with settings in JSON, once for all tests."""
    return engines.serve(model, **json.loads(settings))


def stock(engines: Engines, model: str, **kwargs: object) -> Answer:
    answer = served(engines, model, json.dumps({"env": STOCK, **kwargs}))
    assert not answer.summary, "stock vLLM was meant, but the plugin served"
    return answer


def sparse(engines: Engines, model: str, **kwargs: object) -> Answer:
    answer = served(engines, model, json.dumps(kwargs))
    assert "8 layers sparse" in answer.summary, answer.summary
    return answer


@pytest.mark.parametrize("model", FAMILIES)
def test_int8_tokens_equal_stock_in_every_layout(engines: Engines, store: Path, model: Decoder) -> None:
    expected = stock(engines, checkpoint(store, model, "6:8"))
    # answers depend on prompts
    assert len({tuple(tokens) for tokens in expected.tokens}) == len(expected.tokens)
    for layout in ("dense", "slided", "packed"):
        answer = sparse(engines, checkpoint(store, model, "6:8", layout))
        assert answer.tokens == expected.tokens, layout
        assert f"{layout} layout; backend reference" in answer.summary


@pytest.mark.parametrize("pattern", PATTERNS)
def test_int8_tokens_equal_stock_for_every_pattern(engines: Engines, store: Path, pattern: str) -> None:
    """K is 128 and 320: most patterns leave a tail.  Layouts alternate, both are compared for 6:8 above."""
    layout = "slided" if PATTERNS.index(pattern) % 2 else "dense"
    expected = stock(engines, checkpoint(store, QWEN, pattern))
    assert sparse(engines, checkpoint(store, QWEN, pattern, layout)).tokens == expected.tokens


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculative_decoding_tokens_equal_stock(engines: Engines, store: Path, method: str) -> None:
    """By n-grams of the text, or by a draft model at another pattern, for which not every CPU build has kernels."""
    model, draft = (checkpoint(store, QWEN, pattern) for pattern in ("6:8", "2:4"))
    speculation: dict[str, object] = {"method": method, "num_speculative_tokens": 3}
    speculation |= {"prompt_lookup_max": 3} if method == "ngram" else {"model": draft}
    settings = {"options": {"speculative_config": speculation}}
    expected = engines.ask(Request(model, env=STOCK, **settings))
    if expected.error and method == "draft_model":
        pytest.skip(f"stock vLLM drafts nothing here: {expected.error.splitlines()[-1][:200]}")
    assert not expected.error, expected.error
    answer = engines.serve(model, **settings)
    assert answer.tokens == expected.tokens
    layers = [served["layers"] for served in summaries(answer.log)]
    assert layers == [{"6:8": 8}, {"2:4": 8}][: 1 + (method == "draft_model")]


def test_per_tensor_scales_tokens_equal_stock(engines: Engines, store: Path) -> None:
    source = write_w8a8(QWEN, store / "per-tensor", strategy="tensor")
    dense = str(converted(source, store / "per-tensor-pruned", "6:8", "dense"))
    assert sparse(engines, dense).tokens == stock(engines, dense).tokens


@pytest.mark.parametrize(
    ("quant", "form", "env"),
    [
        ("int8", "sparse-24-bitmask", {}),  # the format implies 2:4
        ("fp8", "sparse-bitmask", {"USE_CUSPARSELT": "1", "SPARSITY": "2_4"}),
    ],
)
def test_sparse_formats_of_compressed_tensors_equal_dense(
    engines: Engines, store: Path, quant: str, form: str, env: dict[str, str]
) -> None:
    """Tokens equal those of the dense weights; tests/checkpoint/test_converted.py has files of that package."""
    dense = checkpoint(store, LLAMA, "2:4", "dense", quant)
    model = stored_sparse(Path(dense), store / form, form)
    assert sparse(engines, model, env=env).tokens == sparse(engines, dense).tokens


def stored_sparse(dense: Path, out: Path, form: str) -> str:
    """Rewrite a checkpoint of 2:4 as compressed-tensors stores it."""
    tensors: dict[str, Tensor | None] = {}
    for name, w in tensors_of(dense).items():
        if w.dtype in (INT8, FP8):
            layer, counts = name.removesuffix(".weight"), (w.float() != 0).sum(-1)
            values, bitmask = packed(w, w.shape[1] // 2 if form == "sparse-24-bitmask" else None)
            tensors |= {name: None, f"{layer}.compressed": values, f"{layer}.bitmask": bitmask}
            offsets = counts.cumsum(0) - counts
            tensors |= {f"{layer}.shape": torch.tensor(w.shape), f"{layer}.row_offsets": offsets}
    targets = {"targets": ["Linear"], "ignore": ["lm_head"]}  # vLLM ignores the format without targets
    structure = "2:4" if form == "sparse-24-bitmask" else "unstructured"
    sparsity = {"format": form, "sparsity_structure": structure, "global_sparsity": 0.5, **targets}
    return edited(dense, out, tensors, {"slidesparse": None, "sparsity_config": sparsity})


def test_cublaslt_path_tokens_equal_stock(engines: Engines, store: Path) -> None:
    expected = stock(engines, checkpoint(store, QWEN, "6:8"))
    for layout in ("dense", "slided", "packed"):
        model = checkpoint(store, QWEN, "6:8", layout)
        answer = engines.serve(model, env={"USE_CUBLASLT": "1"})
        assert answer.summary.startswith("dense: 8 layers on the cuBLASLt path (dense)")
        assert summaries(answer.log)[-1]["layers"] == {"dense": 8}  # no pattern is used, as doctor says
        assert answer.tokens == expected.tokens


@pytest.mark.parametrize(
    "env",
    [
        {"USE_CUSPARSELT": "1", "SPARSITY": "dense"},
        {"SLIDESPARSE": "require"},
        {"SLIDESPARSE_BACKEND": "reference"},
        {},
    ],
    ids=["flags", "require", "auto", "converted"],
)
def test_unpruned_model_equals_stock(engines: Engines, tmp_path: Path, env: dict[str, str]) -> None:
    """No layer of an unpruned model is refused, and its blocks are multiplied as they are."""
    model = write_w8a8(QWEN, tmp_path / "source", "int8")
    if not env:
        model = converted(model, tmp_path / "converted", "dense")
    answer = engines.serve(model, env=env)
    assert answer.summary.startswith(
        "dense (nothing pruned): 8 layers in blocks, each dense or 2:4 by its zeros, 1 dense ("
    )
    assert answer.tokens == stock(engines, str(model)).tokens


@pytest.fixture(scope="module")
def bare(store: Path) -> str:
    """A pruned checkpoint without metadata."""
    return edited(Path(checkpoint(store, QWEN, "6:8")), store / "bare", {}, {"slidesparse": None})


def test_flags_serve_checkpoint_without_metadata_sparse(engines: Engines, bare: str) -> None:
    """The flags give the pattern of the pruned weights, and the loader checks it."""
    stock_answer = stock(engines, bare)
    assert sparse(engines, bare, env=SPARSE_FLAGS).tokens == stock_answer.tokens
    spawned = {**SPARSE_FLAGS, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    assert sparse(engines, bare, env=spawned, task="strip_env").tokens == stock_answer.tokens


def test_fp8_error_is_at_most_twice_that_of_stock(engines: Engines, store: Path) -> None:
    """Both sum FP8 products in float32, in different orders.

    The yardstick is the same model with FP8 products summed in float64.  How far stock vLLM's top-1 log-probabilities
    are from it is the dense kernel's own error (it grows where a last bit decides how an activation rounds to FP8).
    Two float32 sums of the same terms differ by at most the sum of their errors, so the sparse error is bounded by
    twice the dense kernel's error, at the worst position and on average, plus one rounding of the log-probability.
    """
    dense, slided = (checkpoint(store, LLAMA, "6:8", layout, "fp8") for layout in ("dense", "slided"))
    exact = _flat(sparse(engines, dense, task="logprobs", yardstick="float64").logprobs)
    assert len(exact) > 100
    rounding = max(map(abs, exact)) * 2**-23

    def errors(answer: Answer) -> list[float]:
        return [abs(a - b) for a, b in zip(_flat(answer.logprobs), exact, strict=True)]

    stock_errors = errors(stock(engines, dense, task="logprobs"))
    assert mean(stock_errors) < 0.02 * stdev(exact)  # otherwise the bound would be meaningless
    for model in (dense, slided):
        sparse_errors = errors(sparse(engines, model, task="logprobs"))
        for name, statistic in (("worst", max), ("average", mean)):
            bound = 2 * statistic(stock_errors) + rounding
            assert statistic(sparse_errors) <= bound, f"{model}: {name} error"


def _flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "layout"), [("4:6", "slided"), ("4:6", "packed")])
def test_tp2_tokens_equal_stock(engines: Engines, store: Path, pattern: str, layout: str) -> None:
    """Shards have 64 and 160 columns, which cut blocks of 6.  The dense layout is tested below."""
    options = {"tensor_parallel_size": 2}
    expected = stock(engines, checkpoint(store, QWEN, pattern), options=options)
    model = checkpoint(store, QWEN, pattern, layout)
    assert sparse(engines, model, options=options).tokens == expected.tokens


@pytest.mark.parametrize(
    ("layout", "quant"), [("dense", "int8"), ("slided", "int8"), ("packed", "int8"), ("dense", "fp8")]
)
def test_dummy_weights_are_served_sparse(engines: Engines, store: Path, layout: str, quant: str) -> None:
    model = checkpoint(store, QWEN, "6:8", layout, quant)
    assert sparse(engines, model, options={"load_format": "dummy"}).tokens


@pytest.mark.parametrize("layout", ["dense", "slided", "packed"])
def test_reloaded_weights_give_the_same_tokens(engines: Engines, store: Path, layout: str) -> None:
    model = checkpoint(store, QWEN, "6:8", layout)
    assert sparse(engines, model, task="reload").tokens == sparse(engines, model).tokens


# Layers of several patterns, or of none

RULES = ["down_proj=8:10", r"layers\.1\.mlp\.(gate|up)_proj=4:6"]


def test_mixed_patterns_tokens_equal_stock(engines: Engines, source: Path, tmp_path: Path) -> None:
    for layout in ("dense", "slided"):
        convert(source, tmp_path / layout, layer=[*RULES, r"1.*o_proj=dense"], layout=layout)
    answers = engines.as_stock(tmp_path / "dense"), engines.serve(tmp_path / "slided")
    assert answers[0].tokens == answers[1].tokens
    for answer in answers:
        assert answer.summary.startswith(
            "6:8 (2 of every 8 pruned): 7 layers sparse (1 at 4:6, 4 at 6:8, 2 at 8:10), "
            "1 not pruned (by the same backend), 1 dense (1 lm_head)"
        ), answer.summary


def test_unpruned_layers_beside_slided_ones_of_as_many_columns(engines: Engines, tmp_path: Path) -> None:
    """At 2:4 a slided weight has the columns of an unpruned one, which obeys no pattern."""
    source = write_w8a8(QWEN, tmp_path / "source")
    convert(source, tmp_path / "out", "2:4", layer=["down_proj=dense"], layout="slided")
    answer = engines.serve(tmp_path / "out")
    assert "6 layers sparse, 2 not pruned" in answer.summary, answer.summary


@pytest.mark.slow
def test_mixed_patterns_tp2_tokens_equal_stock(engines: Engines, source: Path, tmp_path: Path) -> None:
    """Shards have 64 and 160 columns: whole blocks of 10 and 8, cut blocks of 6."""
    convert(source, tmp_path / "out", "4:6", layer=["down_proj=8:10"])
    answer = engines.as_stock(tmp_path / "out", options={"tensor_parallel_size": 2})
    assert "8 layers sparse (6 at 4:6, 2 at 8:10)" in answer.summary


HEAD_BY_VLLM, HEAD_BY_US = "1 dense (1 lm_head)", "1 not pruned (by the same backend), 0 dense"


@pytest.mark.parametrize(
    ("targets", "fragment", "served"),
    [(["Linear"], "lm_head dequantized", HEAD_BY_VLLM), (["Linear", "lm_head"], "", HEAD_BY_US)],
)
def test_lm_head_of_a_quantized_source_tokens_equal_stock(
    engines: Engines, tmp_path: Path, targets: list[str], fragment: str, served: str
) -> None:
    """vLLM serves a quantized head, but cannot load the other source's head unless it is rewritten."""
    from compressed_tensors.quantization import preset_name_to_scheme

    source = compressed(tmp_path / "source", {"group_0": preset_name_to_scheme("W8A8", targets)}, [], QWEN)
    assert fragment in convert(source, tmp_path / "out").plan.rewritten
    answer = engines.as_stock(shrink_codes(tmp_path / "out"))
    assert "8 layers sparse, " + served in answer.summary


def write_gemma(model: Decoder, folder: Path) -> Path:
    """Write a Gemma 3, whose kind is tied by default."""
    settings = {**DECODERS["gemma3_text"], "head_dim": 32, "vocab_size": model.vocabulary}
    return tiny("gemma3_text", folder, **{**settings, "tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("layout", "size", "make"),
    [
        ("dense", 1, write_w8a8),
        ("dense", 2, write_float),
        ("slided", 1, write_float),
        ("slided", 2, write_w8a8),
        ("dense", 1, write_gemma),
    ],
)
def test_lm_head_that_convert_quantizes_tokens_equal_stock(
    engines: Engines, tmp_path: Path, layout: str, size: int, make: Callable[[Decoder, Path], Path]
) -> None:
    """Half of 516 tokens is no multiple of 64, to which vLLM fills a head, and parts have unlike numbers of tokens."""
    source = make(replace(QWEN, vocabulary=516), tmp_path / "source")
    options = {"tensor_parallel_size": size}
    convert(source, tmp_path / "out", layer=["lm_head=dense"])
    stored = tensors_of(shrink_codes(tmp_path / "out"))
    assert {stored[f"lm_head.weight{end}"].dtype for end in ("", "_scale")} == {torch.int8, torch.float32}
    expected = stock(engines, str(tmp_path / "out"), options=options)
    if layout != "dense":
        convert(tmp_path / "out", tmp_path / layout, layout=layout)
    served = tmp_path / layout if layout != "dense" else tmp_path / "out"
    answer = engines.serve(served, options=options)
    assert answer.tokens == expected.tokens
    assert "8 layers sparse, " + HEAD_BY_US in answer.summary
    dummy = {**options, "load_format": "dummy"}
    reloaded = engines.serve(served, options=dummy, task="reload_after_dummy")
    assert (reloaded.tokens, reloaded.summary) == (answer.tokens, answer.summary)


WIDE = Decoder("Qwen2ForCausalLM", hidden=256, intermediate=512, head_dim=64)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_half_pruned_blocks_tokens_equal_stock(engines: Engines, tmp_path: Path, size: int) -> None:
    """Version 0.2 wrote 2:4@50%, here beside a layer of 6:8 and one that is not pruned."""
    folder = write_w8a8(WIDE, tmp_path / "out")
    patterns = dict.fromkeys(WIDE.linears(), parse_pattern("2:4@50%"))
    patterns["model.layers.1.mlp.down_proj"] = parse_pattern("6:8")
    del patterns["model.layers.1.self_attn.o_proj"]
    tensors = tensors_of(folder)
    rewrite(folder, **{f"{name}.weight": prune(tensors[f"{name}.weight"], p) for name, p in patterns.items()})
    layers = {name: LayerEntry(pattern, WIDE.linears()[name][1]) for name, pattern in patterns.items()}
    edit_block(folder, **{KEY: Metadata(parse_pattern("2:4@50%"), "dense", layers).to_json()})
    answer = engines.as_stock(folder, options={"tensor_parallel_size": size})
    assert answer.summary.startswith(
        "2:4@50% (2 of every 4 pruned in 50% of the blocks): 7 layers sparse (6 at 2:4@50%, 1 at 6:8), "
        "1 not pruned (by the same backend), 1 dense (1 lm_head)"
    ), answer.summary


NO_PRUNED_LAYERS = "none of the checkpoint's pruned layers is in this part of the model"


def test_model_part_without_pruned_layers_is_served(engines: Engines, tmp_path: Path) -> None:
    """Such as a quantized draft in the checkpoint of a pruned model, with or without a flag for the sparse path."""
    folder = write_w8a8(QWEN, tmp_path / "draft")
    layers = {"model.layers.7.mlp.down_proj": LayerEntry(SlidePattern(8), QWEN.intermediate)}
    edit_block(folder, **{KEY: Metadata(SlidePattern(8), "dense", layers).to_json()})
    for env in ({}, {"USE_CUSPARSELT": "1"}):
        answer = engines.as_stock(folder, env)
        assert "0 layers sparse, 8 not pruned (by the same backend), 1 dense (1 lm_head)" in answer.summary
        assert answer.summary.endswith(NO_PRUNED_LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_stage_without_pruned_layers(engines: Engines, source: Path, tmp_path: Path, layout: str) -> None:
    """It only loads, as vLLM's engine for CPUs computes nothing in pipelines."""
    convert(source, tmp_path / "out", layer=[r"layers\.1\.=dense"], layout=layout)
    answer = engines.serve(tmp_path / "out", options={"pipeline_parallel_size": 2}, work={"prompts": []})
    assert "4 layers sparse" in answer.log
    assert NO_PRUNED_LAYERS in answer.log


# Weights that are replaced while a server runs: each layer stays sparse or dense, as it was at first.  Tokens after a
# reload of others are compared on GPUs (test_gpu_serving), because vLLM's own CPU layers keep their first weights.

DOWN = "model.layers.0.mlp.down_proj.weight"
SPARSE_SINCE = "The layer has been sparse since the server started"


def dense_weight() -> Tensor:
    """A weight of DOWN that breaks 6:8."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 60, (QWEN.hidden, QWEN.intermediate), dtype=INT8, generator=generator)


@pytest.fixture(scope="module")
def partly(bare: str) -> str:
    """The checkpoint with one layer that breaks the pattern."""
    return edited(Path(bare), Path(bare).with_name("partly"), {DOWN: dense_weight()}, {})


def test_weights_loaded_after_dummy_ones_are_not_pruned(engines: Engines, source: Path, store: Path) -> None:
    """Dummy weights are pruned to the pattern; weights that are loaded later into the same engine must obey it."""
    pruned, dummy = checkpoint(store, QWEN, "6:8"), {"load_format": "dummy"}
    reloaded = sparse(engines, pruned, options=dummy, task="reload_after_dummy")
    assert reloaded.tokens == sparse(engines, pruned).tokens
    answer = engines.ask(Request(str(source), env=SPARSE_FLAGS, options=dummy, task="reload_after_dummy"))
    message = answer.error + answer.log
    assert "has 8 non-zeros, 6:8 (2 of every 8 pruned)" in message
    assert f"{SPARSE_SINCE}; restart it to serve these weights" in message


def test_reload_keeps_a_dense_layer_dense(engines: Engines, bare: str, partly: str) -> None:
    work = {"other": bare, "model": partly}
    answer = engines.serve(partly, env=SPARSE_FLAGS, task="reload_other", work=work)
    assert "7 layers sparse, 2 dense (1 lm_head, 1 whose weights break the pattern)" in answer.summary
    assert answer.data["turns"][0] == stock(engines, partly).tokens
