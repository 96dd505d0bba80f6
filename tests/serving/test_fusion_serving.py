"""The compiler pass that fuses norms and activations with quantization: its registration in vLLM, and served models."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import Answer, Engines, Request
from models import LLAMA, QWEN, Decoder, converted, write_w8a8

pytestmark = pytest.mark.vllm


class TestRegister:
    """Registration of the pass in the options of a simulated compilation."""

    @staticmethod
    def registered(
        monkeypatch: pytest.MonkeyPatch,
        fuse: bool = True,
        backend_name: str = "reference",
        **compilation: Any,
    ) -> tuple[str, dict[str, Any]]:
        from slidesparse.vllm_patch import compat, fusion

        options = compilation.setdefault("inductor_compile_config", {})
        config = SimpleNamespace(compilation_config=SimpleNamespace(**compilation), additional_config={})
        monkeypatch.setattr(compat, "current_config", lambda: config)
        resolution: Any = SimpleNamespace(fuse=fuse, backend=backend_name)
        status = fusion.register("a key", resolution)
        # Either way the model's key is part of vLLM's config.
        registered_pass = options.get(fusion.PASS_KEY)
        if isinstance(registered_pass, fusion.FusionPass):
            assert (registered_pass.keys, config.additional_config) == (("a key",), {})
            assert registered_pass.fuses == (status == "norms and activations fused")
        else:
            assert config.additional_config == {fusion.ADDITIONAL: ["a key"]}
        return status, options

    @pytest.mark.parametrize(("mode", "backend"), [(2, "inductor"), (3, "inductor"), (3, "")])
    def test_pass_is_registered_once(self, monkeypatch: pytest.MonkeyPatch, mode: int, backend: str) -> None:
        status, options = self.registered(monkeypatch, mode=mode, backend=backend)
        assert status == "norms and activations fused"
        (fusion_pass,) = options.values()
        second_status, _ = self.registered(
            monkeypatch, mode=mode, backend=backend, inductor_compile_config=options
        )
        assert second_status == status
        assert list(options.values()) == [fusion_pass]

    @pytest.mark.parametrize(
        ("mode", "backend"), [(0, "inductor"), (None, "inductor"), (1, "inductor"), (3, "eager")]
    )
    def test_pass_is_not_registered_without_inductor(
        self, monkeypatch: pytest.MonkeyPatch, mode: int | None, backend: str
    ) -> None:
        status, _ = self.registered(monkeypatch, mode=mode, backend=backend)
        assert status == "norms and activations not fused: the model is not compiled by Inductor"

    def test_pass_is_not_registered_for_a_backend_without_fusion(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        status, _ = self.registered(monkeypatch, backend_name="cusparselt", mode=3, backend="inductor")
        assert "not fused" in status
        assert "cusparselt" in status

    def test_pass_is_not_registered_if_fusion_is_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.registered(monkeypatch, fuse=False, mode=3, backend="inductor")[0] == ""

    def test_pass_does_not_replace_another_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from slidesparse.vllm_patch.fusion import PASS_KEY

        other_pass = object()
        status, options = self.registered(
            monkeypatch, mode=3, backend="inductor", inductor_compile_config={PASS_KEY: other_pass}
        )
        assert status == f"norms and activations not fused: {PASS_KEY} is taken by object"
        assert options == {PASS_KEY: other_pass}

    def test_pass_is_not_registered_in_a_vllm_without_custom_passes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from slidesparse.vllm_patch import fusion

        monkeypatch.setattr(fusion, "FusionPass", type("FusionPass", (), {}))
        status, options = self.registered(monkeypatch, mode=3, backend="inductor")
        assert status == "norms and activations not fused: this vLLM takes no passes"
        assert options == {}


def test_cache_keys_change_hashes_of_nested_and_draft_models(tmp_path: Path) -> None:
    """The language model of a multimodal model and a draft have copies of the config, with another model's
    config.

    vLLM since 0.32 hashes a nested model apart from the whole one; what they depend on must change all
    hashes.
    """
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


def test_pass_survives_copying_and_changes_the_config_hash() -> None:
    from slidesparse.vllm_patch.fusion import PASS_KEY, FusionPass
    from vllm.config import CompilationConfig

    fusion_pass = FusionPass()
    uuids = [fusion_pass.uuid()]
    fusion_pass.keys = ("a key",)
    uuids.append(fusion_pass.uuid())
    fusion_pass.fuses = True
    assert len({*uuids, fusion_pass.uuid()}) == 3
    for copied in (copy.deepcopy(fusion_pass), pickle.loads(pickle.dumps(fusion_pass))):
        assert copied.uuid() == fusion_pass.uuid()
    without_pass, with_pass = CompilationConfig(), CompilationConfig()
    with_pass.inductor_compile_config[PASS_KEY] = fusion_pass
    assert without_pass.compute_hash() != with_pass.compute_hash()


# Each of the two layers has two norms and an activation; the first norm has no residual yet, and o_proj reads the
# attention's output.
FUSED = "3 add_rms_norm_linear, 2 linear, 1 rms_norm_linear, 2 silu_mul_linear"


def checkpoint(folder: Path, model: Decoder) -> str:
    return str(converted(write_w8a8(model, folder / "plain"), folder / "pruned", "6:8"))


def served(engines: Engines, model: str, cache: Path, fuse: str, eager: bool) -> Answer:
    """Serve with a separate Inductor cache, because no pass runs on a cached graph."""
    env = {"SLIDESPARSE_FUSE": fuse, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    answer = engines.serve(model, env=env, options={"enforce_eager": eager})
    assert "8 layers sparse" in answer.summary
    return answer


@pytest.mark.slow
def test_fused_tokens_equal_unfused(engines: Engines, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, LLAMA)
    unfused = served(engines, path, tmp_path / "cache", "0", eager=False)
    fused = served(engines, path, tmp_path / "cache", "1", eager=False)
    assert f"SlideSparse fusion in a graph: {FUSED}" in fused.log
    assert fused.summary.endswith("; norms and activations fused")
    assert "SlideSparse fusion" not in unfused.log
    assert "fused" not in unfused.summary
    assert fused.tokens == unfused.tokens


@pytest.mark.slow
def test_piecewise_graphs_are_fused_and_cached_separately(engines: Engines, tmp_path: Path) -> None:
    """vLLM compiles as on GPUs: norms are its own operators, graphs end at attentions, and compiled graphs
    are loaded by an engine with the same flags, and by no other.
    """
    path = checkpoint(tmp_path, QWEN)

    def answer(fuse: str) -> Answer:
        env = {"SLIDESPARSE_FUSE": fuse, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        return engines.serve(path, env=env, options={"enforce_eager": False}, pieces=True)

    fused, unfused, cached = answer("1"), answer("0"), answer("1")
    layer = "1 linear, 1 silu_mul_linear"
    for graph in (
        "1 rms_norm_linear\n",
        f"2 add_rms_norm_linear, {layer}\n",
        f"1 add_rms_norm_linear, {layer}\n",  # the last norm feeds lm_head, which SlideSparse does not serve
    ):
        assert fused.log.count(f"SlideSparse fusion in a graph: {graph}") == 1
    for other in (unfused, cached):
        assert "SlideSparse fusion" not in other.log
        assert other.tokens == fused.tokens
    assert "Directly load AOT compilation" in cached.log
    assert "Directly load AOT compilation" not in unfused.log
    assert unfused.tokens == served(engines, path, tmp_path, "0", eager=True).tokens


def test_eager_models_are_not_fused(engines: Engines, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, QWEN)
    answer = served(engines, path, tmp_path, "1", eager=True)
    assert answer.summary.endswith("; norms and activations not fused: the model is not compiled by Inductor")
    assert answer.tokens == served(engines, path, tmp_path, "0", eager=True).tokens
    keys = [
        engines.ask(Request(path, env={"SLIDESPARSE_FUSE": fuse}, task="config_hash")).config_hash
        for fuse in ("0", "1", "")
    ]
    assert len(set(keys)) == 2
    assert "" not in keys
