"""BitNet in vLLM: log-probabilities equal transformers', and sparse tokens equal those of stock kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from bitnets import ONLINE, best, greedy, load, transformers_model, write_master
from checkpoints import converted
from engine_tasks import PROMPTS
from engines import Answer, Engines

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bitnet")
    master = write_master(root / "master")
    dense = converted(master, root / "dense", "dense")
    return {"master": master, "dense": dense, "6:8": converted(master, root / "6_8", "6:8")}


def ask(engines: Engines, model: Path, task: str = "generate", **options: object) -> Answer:
    return engines.serve(model, task=task, options=options)


def test_float_logprobs_equal_transformers(engines: Engines, checkpoints: dict[str, Path]) -> None:
    """On two ranks, too, which normalize whole rows; of INT8 each vLLM rank quantizes only its part of a row."""
    model = load(transformers_model(), checkpoints["master"])
    expected = best(model, PROMPTS)
    for ranks in (1, 2):
        logprobs = ask(engines, checkpoints["master"], "logprobs", tensor_parallel_size=ranks).logprobs
        for actual_row, expected_row in zip(logprobs, expected, strict=True):
            actual, row = torch.tensor(actual_row), torch.tensor(expected_row)
            torch.testing.assert_close(actual, row, atol=1e-4, rtol=0)
    assert ask(engines, checkpoints["master"]).tokens == greedy(model, PROMPTS, 16)


def test_int8_logprobs_match_those_of_transformers(engines: Engines, checkpoints: dict[str, Path]) -> None:
    """Both sum in different orders, so a code near a rounding tie may differ, which changes later layers slightly.

    Most positions differ only like float32 sums (7e-7 measured), and the total difference is far below the effect of
    quantization: 0.3% of it were measured.
    """
    models = (load(transformers_model(config), checkpoints["master"]) for config in (None, ONLINE))
    exact, expected = (torch.tensor([x for row in best(model, PROMPTS) for x in row]) for model in models)
    actual = torch.tensor([x for row in ask(engines, checkpoints["dense"], "logprobs").logprobs for x in row])
    assert actual.shape == expected.shape
    difference, quantization = (actual - expected).abs(), (expected - exact).abs()
    assert difference.median() < 1e-4
    assert difference.square().mean().sqrt() < 0.02 * quantization.square().mean().sqrt()


@pytest.mark.parametrize("pattern", ["dense", "6:8"])
def test_int8_tokens_equal_stock(engines: Engines, checkpoints: dict[str, Path], pattern: str) -> None:
    stock = ask(engines, checkpoints[pattern], quantization="compressed-tensors")
    sparse = ask(engines, checkpoints[pattern])
    layers = "in blocks, each dense or 2:4 by its zeros" if pattern == "dense" else "sparse"
    assert f"8 layers {layers}, 1 dense (1 lm_head)" in sparse.summary
    assert sparse.tokens == stock.tokens
    assert len({token for row in sparse.tokens for token in row}) > 10


@pytest.mark.slow
def test_norms_and_subnorms_are_fused(engines: Engines, checkpoints: dict[str, Path]) -> None:
    """Each quantized layer reads a norm, and all of them are fused, in graphs that end at attentions as on GPUs."""
    env, options = {"SLIDESPARSE_FUSE": "1"}, {"enforce_eager": False}
    fused = engines.serve(checkpoints["6:8"], env=env, options=options, pieces=True)
    found = re.findall(r"fusion in a graph: (?:(\d) add_rms_norm_linear, )?(\d) rms_norm_linear\n", fused.log)
    assert found == [("", "1"), ("2", "2"), ("1", "2")]
    assert fused.tokens == ask(engines, checkpoints["6:8"]).tokens


def test_plugin_registers_its_model_and_method_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin registers them unless it is disabled, and does not replace a model that vLLM has."""
    import slidesparse.vllm_patch as plugin
    from vllm import ModelRegistry
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    monkeypatch.setattr(ModelRegistry, "models", {})
    monkeypatch.setenv("DISABLE_SLIDESPARSE", "1")
    plugin.register()
    assert not ModelRegistry.models
    monkeypatch.delenv("DISABLE_SLIDESPARSE")
    plugin.register()
    registered = ModelRegistry.models["BitNetForCausalLM"]
    assert registered.load_model_cls().__name__ == "BitNetForCausalLM"
    plugin.register()
    assert ModelRegistry.models["BitNetForCausalLM"] is registered
    assert QUANTIZATION_METHODS.count("slidesparse") == 1
