"""The compiler pass that fuses norms and activations with quantization: its registration in vLLM, and served models."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import converted
from edits import SPARSE_FLAGS, edited
from engines import STOCK, Answer, Engines
from models import QWEN, write_w8a8
from test_serving import DOWN, dense_weight

pytestmark = pytest.mark.vllm


FUSED, NOT = "norms and activations fused", "norms and activations not fused: "
INDUCTOR = f"{NOT}the model is not compiled by Inductor"
VALID = {"mode": 3, "compiler": "inductor", "backend": "reference", "fuse": True, "taken": False}


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"mode": 2}, FUSED),
        ({"compiler": ""}, FUSED),
        *(({"mode": mode}, INDUCTOR) for mode in (0, None, 1)),
        ({"compiler": "eager"}, INDUCTOR),
        ({"backend": "cusparselt"}, f"{NOT}backend cusparselt quantizes by"),
        ({"fuse": False}, ""),
        ({"taken": True}, f"{NOT}post_grad_custom_post_pass is taken by int"),
    ],
)
def test_pass_is_registered(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], status: str) -> None:
    """Either way the model's key is part of vLLM's config; another program's pass is not replaced."""
    from slidesparse.vllm_patch import compat, fusion

    case = SimpleNamespace(**{**VALID, **changed})
    options: dict[str, Any] = {fusion.PASS_KEY: 1} if case.taken else {}
    compilation = SimpleNamespace(mode=case.mode, backend=case.compiler, inductor_compile_config=options)
    config = SimpleNamespace(compilation_config=compilation, additional_config={})
    monkeypatch.setattr(compat, "current_config", lambda: config)
    for _ in range(2):
        actual = fusion.register("a key", case)
        assert actual.startswith(status)
        assert bool(actual) is bool(status)
    (registered,) = options.values()
    if case.taken:
        assert config.additional_config == {fusion.ADDITIONAL: ["a key"]}
    else:
        assert (registered.keys, registered.fuses) == (("a key",), status == FUSED)


def test_cache_keys_change_hashes_of_nested_and_draft_models(tmp_path: Path) -> None:
    """Both have copies of the config, with another model's; vLLM since 0.32 hashes a nested model apart."""
    from slidesparse.vllm_patch import fusion
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.config.utils import replace

    model = ModelConfig(model=str(write_w8a8(QWEN, tmp_path / "plain")), skip_tokenizer_init=True)
    config = VllmConfig(model_config=model)
    configs = config, replace(config), config.with_hf_config(model.hf_config, ["Qwen2ForCausalLM"])
    hashes = [[each_config.compute_hash() for each_config in configs]]
    for key in ("6:8 by hopper", "dense: model.layers.0.mlp.down_proj"):
        with set_current_vllm_config(configs[1]):
            fusion.add_cache_key(key)
        hashes.append([each_config.compute_hash() for each_config in configs])
    assert [len(set(values)) for values in zip(*hashes, strict=True)] == [3, 3, 3]


def served(engines: Engines, model: Path | str, fuse: str, **settings: Any) -> Answer:
    answer = engines.serve(model, env={**SPARSE_FLAGS, "SLIDESPARSE_FUSE": fuse}, **settings)
    assert "sparse" in answer.summary
    return answer


@pytest.mark.slow
def test_piecewise_graphs_are_fused_and_cached_separately(engines: Engines, tmp_path: Path) -> None:
    """vLLM compiles as on GPUs: norms are its own operators, and graphs end at attentions.

    Compiled graphs are loaded by an engine with the same flags, unless the folder holds other weights, one of whose
    layers is not pruned.
    """
    pruned = converted(write_w8a8(QWEN, tmp_path / "plain"), tmp_path / "pruned", "6:8")
    path = tmp_path / "model"

    def compiled() -> Answer:
        return served(engines, path, "1", options={"enforce_eager": False}, pieces=True)

    edited(pruned, path, {}, {"slidesparse": None})
    fused, cached = compiled(), compiled()
    layer = "1 linear, 1 silu_mul_linear"
    for graph in (
        "1 rms_norm_linear\n",
        f"2 add_rms_norm_linear, {layer}\n",
        f"1 add_rms_norm_linear, {layer}\n",  # the last norm feeds lm_head, which SlideSparse does not serve
    ):
        assert fused.log.count(f"SlideSparse fusion in a graph: {graph}") == 1
    assert fused.summary.endswith("; norms and activations fused")
    assert fused.tokens == served(engines, path, "0").tokens
    assert cached.tokens == fused.tokens
    assert "Directly load AOT compilation" in cached.log
    assert "SlideSparse fusion" not in cached.log
    shutil.rmtree(path)
    edited(pruned, path, {DOWN: dense_weight()}, {"slidesparse": None})
    changed = compiled()
    assert "Directly load AOT compilation" not in changed.log
    assert "7 layers sparse" in changed.summary
    assert changed.tokens == engines.serve(path, env=STOCK).tokens


def test_eager_models_are_not_fused(engines: Engines, tmp_path: Path) -> None:
    path = converted(write_w8a8(QWEN, tmp_path / "plain"), tmp_path / "pruned", "6:8")
    answer = served(engines, path, "1")
    assert answer.summary.endswith("; norms and activations not fused: the model is not compiled by Inductor")
    assert answer.tokens == served(engines, path, "0").tokens
    environments = [{"SLIDESPARSE_FUSE": fuse} for fuse in ("0", "1", "")]
    keys = [engines.serve(path, env=env, task="config_hash").config_hash for env in environments]
    assert len(set(keys)) == 2
