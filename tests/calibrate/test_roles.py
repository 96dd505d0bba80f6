"""Weights are rotated, permuted and scaled exactly where that leaves a model's outputs as they are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from calibration import open_model, run, save
from checkpoints import edit_json, tensors_of, write

from slidesparse.calibrate.changes import Change, ChangedReader, Changes
from slidesparse.calibrate.model import Model
from slidesparse.calibrate.permutation import layer_orders, may_permute, ordered_reader
from slidesparse.calibrate.resume import WorkFolder
from slidesparse.calibrate.roles import Pair, random_order, random_rotation, roles_of
from slidesparse.calibrate.rotation import (
    Rotation,
    rotated_reader,
    rotation_obstacle,
    untie_head,
    value_pair,
)
from slidesparse.calibrate.smoothing import smoothed_reader
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import Checkpoint, Reader

# 512 roundings to float32, of sums of up to 256 terms in up to four blocks; the most was 5e-6.  A wrong change moves
# the outputs by as much as they are.
SAME = 512 * 2**-24


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


ROTATED = names("""llama, llama biased, llama tied, llama llama3, mistral, qwen2, qwen3, gemma, vaultgemma, phi3,
    phi3 longrope, granite, ministral3, seed_oss, smollm3, glm, helium, hunyuan_v1_dense, ernie4_5, apertus, arcee,
    diffllama, lfm2, granitemoehybrid, bamba, mamba, mamba2, nemotron_h, recurrent_gemma, qwen3_5_text""")
# Models whose values cannot be permuted: q, k and v are interleaved, or values pass a norm, a gate or another mixer
FIXED_VALUES = names("""gpt_neox, falcon, bloom, persimmon, gpt_bigcode, doge, diffllama, deepseek_v2, deepseek_v3,
    jetmoe, mamba, mamba2, qwen3_next, qwen3_5_text, qwen3_5, nomic_bert, bitnet""")
# Those without a pair of layers in an MLP outside of routed experts
FIXED_MLP = names("""qwen3_moe, mixtral, olmoe, phimoe, granitemoe, gpt_oss, minimax, jetmoe, mamba, mamba2,
    qwen3_vl_moe, bitnet""")
# Those with an activation that is not linear in any of its inputs
UNSCALED = names("""phi, starcoder2, gpt_neox, falcon, nemotron, apertus, arcee, bloom, mpt, gpt_bigcode, persimmon,
    biogpt, nemotron_h, bert, roberta, xlm-roberta, distilbert, electra""")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Return a function that opens a model of `ARCHITECTURES`, with an untied head."""

    @cache
    def opened(name: str) -> Model:
        save(name, folder := tmp_path_factory.mktemp("model"))
        return Model(Skeleton(untie_head(Checkpoint.open(folder))), torch.device("cpu"))

    return opened


def assert_same_outputs(model: Model, reader: Reader, changed: Reader) -> None:
    assert any(not torch.equal(reader.whole(name), changed.whole(name)) for name in model.checkpoint.tensors)
    expected, actual = run(model, reader), run(model, changed)
    assert float((actual - expected).norm()) <= SAME * float(expected.norm())


def pairs_of(model: Model, reader: Reader) -> list[tuple[int, Pair]]:
    """Return the pairs of all blocks, with the blocks' numbers."""
    return [(i, pair) for i, roles in enumerate(roles_of(model, reader)) for pair in roles.pairs]


def obstacle_of(folder: Path) -> str | None:
    model = Model(Skeleton(untie_head(Checkpoint.open(folder))), torch.device("cpu"))
    with model.checkpoint.reader() as reader:
        return rotation_obstacle(model, reader)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_channels_of_pairs_are_permuted(name: str, opened: Callable[[str], Model], tmp_path: Path) -> None:
    model, work = opened(name), WorkFolder(tmp_path)
    with model.checkpoint.reader() as reader:
        pairs = pairs_of(model, reader)
        assert any(pair.is_attention for _, pair in pairs) == (name not in FIXED_VALUES)
        assert any(not pair.is_attention for _, pair in pairs) == (name not in FIXED_MLP)
        for number, pair in pairs:
            orders = layer_orders(model.load(reader, number), pair, random_order(pair, model.device))
            named = {model.full_name(number, layer) + kind: order for (layer, kind), order in orders.items()}
            work.write_tensors(f"layer-{number}{pair.reader}.safetensors", named)
        with work.tensors().reader() as finished:
            if pairs:
                assert_same_outputs(model, reader, ordered_reader(reader, finished))


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in FIXED_MLP])
def test_channels_of_gated_mlps_are_scaled(name: str, opened: Callable[[str], Model]) -> None:
    """Factors are powers of two, so that nothing is rounded."""
    model, generator = opened(name), torch.Generator().manual_seed(0)
    with model.checkpoint.reader() as reader:
        factors = {
            model.full_name(number, pair.reader): 2.0
            ** torch.randint(-9, 9, (pair.width,), generator=generator)
            for number, pair in pairs_of(model, reader)
            if pair.scaled
        }
        assert bool(factors) == (name not in UNSCALED)
        if factors:
            changed = smoothed_reader(reader, model, factors)
            assert_same_outputs(model, reader, changed)
            assert torch.equal(run(model, changed), run(model, reader))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_that_commute_with_rotations_are_rotated(name: str, opened: Callable[[str], Model]) -> None:
    """Others have norms behind layers, LayerNorm, or experts and gates that read the stream."""
    model = opened(name)
    with model.checkpoint.reader() as reader:
        obstacle = rotation_obstacle(model, reader)
        assert (obstacle is None) == (name in ROTATED), obstacle
        if obstacle is None:
            roles = roles_of(model, reader)
            values = {i: pair for i, pair in enumerate(map(value_pair, roles)) if pair}
            r = {
                i: torch.stack(
                    [random_rotation(pair.width, model.device).roll(n, 0) for n in range(pair.kv_heads)]
                )
                for i, pair in values.items()
            }
            rotation = Rotation(random_rotation(model.hidden, model.device), r)
            assert_same_outputs(model, reader, rotated_reader(reader, model, roles, rotation))


def test_rotation_obstacles_outside_of_blocks(tmp_path: Path) -> None:
    """Whatever else reads the residual stream: users of hidden states, and tensors that transformers ignores."""
    source, config = tmp_path / "source", tmp_path / "source" / "config.json"
    save("llama", source)
    tensors, values = tensors_of(source), json.loads(config.read_text())
    assert obstacle_of(write(source, values, {**tensors, "model.rotary_emb.inv_freq": torch.ones(8)})) is None
    write(source, values, {**tensors, "mtp.0.fc.weight": torch.ones(64, 128)})
    assert "mtp.0.fc.weight" in str(obstacle_of(source))
    write(source, values, tensors)
    (source / "modules.json").write_text("[]")
    assert "modules.json" in str(obstacle_of(source))
    (source / "modules.json").unlink()
    edit_json(config, architectures=["LlamaModel"])
    assert "does not predict tokens" in str(obstacle_of(source))


def test_untied_head_is_the_embedding_of_a_tied_model(tmp_path: Path) -> None:
    """A stored head of a tied model is ignored, as by transformers and vLLM; Gemma, tied by default, stays tied."""
    save("llama", tmp_path / "llama")
    edit_json(tmp_path / "llama" / "config.json", tie_word_embeddings=True)
    tied = open_model(tmp_path / "llama")
    untied = Model(Skeleton(untie_head(tied.checkpoint)), tied.device)
    assert untied.checkpoint.config["tie_word_embeddings"] is False
    with tied.checkpoint.reader() as before, untied.checkpoint.reader() as after:
        assert torch.equal(after.whole("lm_head.weight"), after.whole("model.embed_tokens.weight"))
        assert torch.equal(run(tied, before), run(untied, after))
    save("gemma", tmp_path / "gemma", tie_word_embeddings=True)
    assert untie_head(checkpoint := Checkpoint.open(tmp_path / "gemma")) is checkpoint


def test_heads_that_share_an_order_need_whole_blocks() -> None:
    """Else their blocks start at different columns of a head, and one order cannot suit both."""
    shared, alone = Pair("o", ("v",), 4, 2, 16), Pair("o", ("v",), 4, 4, 16)
    assert may_permute(shared, 8)
    assert not may_permute(shared, 6)
    assert may_permute(alone, 6)


def test_changed_tensors_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads read the rows of tensors that follow each other in turn; rotating one takes seconds."""
    save("llama", tmp_path)
    checkpoint, computed = Checkpoint.open(tmp_path), list[str]()
    names = [f"model.layers.0.mlp.{x}_proj.weight" for x in ("down", "gate", "up")]
    changes: Changes = {
        name: Change(lambda w, _, name=name: (computed.append(name), w.flip(0))[1], mixes_rows=True)
        for name in names
    }
    with checkpoint.reader() as reader:
        changed = ChangedReader(reader, changes)
        for pair in itertools.pairwise(names):
            for rows in (slice(0, 8), slice(8, 64)):
                for name in pair:
                    assert torch.equal(changed.rows(name, rows), reader.whole(name).flip(0)[rows])
    assert computed == names
