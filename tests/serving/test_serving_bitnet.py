"""BitNet in vLLM: logits are transformers', sparse tokens those of stock kernels, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bitnets import ONLINE, best, greedy, load, transformers_model, write_master
from engine_tasks import PROMPTS
from engines import Answer, Engines, Request
from models import converted

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bitnet")
    master = write_master(root / "master")
    dense = converted(master, root / "dense", "2_inf")
    return {"master": master, "dense": dense, "6:8": converted(master, root / "6_8", "6:8")}


def ask(
    engines: Engines,
    model: Path,
    task: str = "generate",
    env: dict[str, str] | None = None,
    **options: object,
) -> Answer:
    answer = engines.ask(Request(str(model), env=env or {}, task=task, options=options))
    assert not answer.error, answer.error + answer.log[-3000:]
    return answer


def test_float_logits_are_those_of_transformers(engines: Engines, made: dict[str, Path]) -> None:
    model = load(transformers_model(), made["master"])
    expected = best(model, PROMPTS)
    found = ask(engines, made["master"], "logprobs").logprobs
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=0)
    assert ask(engines, made["master"]).tokens == greedy(model, PROMPTS, 16)


def test_bfloat16_is_as_near_as_transformers(engines: Engines, made: dict[str, Path]) -> None:
    model = load(transformers_model(), made["master"])
    exact = [x for row in best(model, PROMPTS) for x in row]
    rounded = [x for row in best(model.bfloat16(), PROMPTS) for x in row]
    found = [x for row in ask(engines, made["master"], "logprobs", dtype="bfloat16").logprobs for x in row]
    error, allowed = (
        (torch.tensor(x) - torch.tensor(exact)).square().mean().sqrt() for x in (found, rounded)
    )
    assert 0 < error < 2 * allowed


def test_int8_logits_are_those_of_transformers_bit_linear(engines: Engines, made: dict[str, Path]) -> None:
    """The two sum in other orders, so that a code on the edge of two may be either, and moves what follows a little.

    Most positions agree as float32 sums do (measured: 7e-7), and all together by far better than quantization changes
    them: such a code was seen to make 0.3% of it.
    """
    exact, theirs = (
        torch.tensor(
            [x for row in best(load(transformers_model(config), made["master"]), PROMPTS) for x in row]
        )
        for config in (None, ONLINE)
    )
    ours = torch.tensor([x for row in ask(engines, made["dense"], "logprobs").logprobs for x in row])
    assert ours.shape == theirs.shape
    difference, quantization = (ours - theirs).abs(), (theirs - exact).abs()
    assert difference.median() < 1e-4
    assert difference.square().mean().sqrt() < 0.02 * quantization.square().mean().sqrt()


@pytest.mark.parametrize("pattern", ["dense", "6:8"])
def test_tokens_are_those_of_stock_kernels(engines: Engines, made: dict[str, Path], pattern: str) -> None:
    stock = ask(engines, made[pattern], quantization="compressed-tensors")
    ours = ask(engines, made[pattern])
    assert "8 layers sparse, 1 dense (1 lm_head)" in ours.summary
    assert ours.tokens == stock.tokens
    assert len({token for row in ours.tokens for token in row}) > 10


@pytest.mark.slow
def test_all_norms_are_fused(engines: Engines, made: dict[str, Path], tmp_path: Path) -> None:
    """The sub-norms are fused too: each layer that is quantized reads a norm."""
    both = [
        ask(
            engines,
            made["6:8"],
            env={"SLIDESPARSE_FUSE": fuse, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            enforce_eager=False,
        )
        for fuse in "10"
    ]
    assert "SlideSparse fusion in a graph: 3 add_rms_norm_linear, 5 rms_norm_linear" in both[0].log
    assert both[0].tokens == both[1].tokens


def test_ranks_norm_the_whole_row(engines: Engines, made: dict[str, Path]) -> None:
    """In float, as vLLM's ranks quantize their own part of an activation each."""
    expected = best(load(transformers_model(), made["master"]), PROMPTS)
    found = ask(engines, made["master"], "logprobs", tensor_parallel_size=2).logprobs
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=0)


def test_the_plugin_makes_the_model_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and not when it is switched off; a model that vLLM has stays its."""
    import slidesparse.vllm_patch as plugin
    from vllm import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "models", {})
    monkeypatch.setenv("DISABLE_SLIDESPARSE", "1")
    plugin.register()
    assert not ModelRegistry.models
    monkeypatch.delenv("DISABLE_SLIDESPARSE")
    plugin.register()
    known = ModelRegistry.models["BitNetForCausalLM"]
    assert known.load_model_cls().__name__ == "BitNetForCausalLM"
    plugin.register()
    assert ModelRegistry.models["BitNetForCausalLM"] is known
