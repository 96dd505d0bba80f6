"""Models of many architectures run block by block, and their weights are changed, as transformers' whole models say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VISION, multimodal
from calibration import IDS, logits_of, open_model, run, save, some_rotation
from checkpoints import bert, config_of, edit_json, llama, rewrite, tensors_of, write
from torch import Tensor

from slidesparse.calibrate.changes import Change, ChangedReader, Changes
from slidesparse.calibrate.model import Model
from slidesparse.calibrate.permutation import may_permute, ordered_reader
from slidesparse.calibrate.resume import WorkFolder
from slidesparse.calibrate.roles import Pair, layer_orders, random_order, roles_of
from slidesparse.calibrate.rotation import rotated_reader, rotation_obstacle, untie_head
from slidesparse.calibrate.smoothing import smoothed_reader
from slidesparse.checkpoint.storage import Checkpoint, CheckpointError, Reader
from slidesparse.errors import CalibrationError

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


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_and_logits_equal_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """The same operations in the same order: equal bit for bit, also the inputs of all layers of a group."""
    whole = save(name, tmp_path)
    model = open_model(tmp_path)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def keep(path: str, args: tuple[Any, ...], out: Any) -> None:
        outputs[path] = out[0] if isinstance(out, tuple) else out
        if args:
            inputs[path] = args[0]

    for path, module in whole.named_modules():
        module.register_forward_hook(lambda _, args, out, path=path: keep(path, args, out))
    with torch.inference_mode(), model.checkpoint.reader() as reader:
        whole(input_ids=IDS)
        ends = model.ends(reader)
        x = ends.embed(IDS)
        for number in range(model.blocks):
            block, prefix = model.load(reader, number), model.skeleton.prefix(number)
            run_layers = {name for name in model.skeleton.linears(number) if prefix + name in inputs}
            assert {name for group in block.groups for name in group} == run_layers
            for group in block.groups:
                layer_input = block.input(group[0], x)
                assert all(torch.equal(layer_input, inputs[prefix + name]) for name in group), group
            x = block.output(x)
            assert torch.equal(x, outputs[prefix.removesuffix(".")])
        if model.skeleton.generates:
            assert torch.equal(ends.logits(x), outputs[""].logits)


@pytest.mark.parametrize("kind", ["clip_text_model", "canine"])
def test_encoders_that_do_not_say_what_their_embedding_is(kind: str, tmp_path: Path) -> None:
    """Or whether a head is tied to it; they have none."""
    save(kind, tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=None)
    model = open_model(tmp_path)
    with model.checkpoint.reader() as reader:
        assert model.ends(reader).embed(torch.ones(2, 8, dtype=torch.long)).shape[-1] == 64


def test_norms_of_the_first_bert_models(tmp_path: Path) -> None:
    """Such as bert-base-uncased, whose norms have a gamma and a beta."""
    save("bert", tmp_path / "new")
    former = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = tensors_of(tmp_path / "new")
    for new, old in former.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    write(tmp_path / "old", config_of(tmp_path / "new"), tensors)
    assert torch.equal(logits_of(tmp_path / "old"), logits_of(tmp_path / "new"))


def test_tensors_outside_of_blocks_may_be_missing_if_nothing_reads_them(tmp_path: Path) -> None:
    """Such as a pooler; a missing norm or embedding is refused by name."""
    folder = bert(tmp_path / "bert")
    tensors = tensors_of(folder)

    def embed(*missing: str) -> Tensor:
        kept = {name: t for name, t in tensors.items() if name not in missing}
        model = open_model(write(folder, config_of(folder), kept))
        with model.checkpoint.reader() as reader:
            return model.ends(reader).embed(torch.arange(8)[None])

    assert torch.equal(embed(), embed("pooler.dense.weight"))
    for name in ("embeddings.LayerNorm.bias", "embeddings.word_embeddings.weight"):
        with pytest.raises(CheckpointError, match=name):
            embed(name)
    rewrite(llama(tmp_path / "llama"), **{"model.norm.weight": None})
    model = open_model(tmp_path / "llama")
    with model.checkpoint.reader() as reader, pytest.raises(CheckpointError, match="model.norm.weight"):
        model.ends(reader)


def test_longest_sequence(tmp_path: Path) -> None:
    """RoBERTa numbers positions from behind the padding token; LongRoPE's short factors end earlier.

    The rows of a vocabulary as large as that are no positions.
    """
    for name, settings, longest in (
        ("llama", {"vocab_size": 256, "pad_token_id": 255}, 256),
        ("roberta", {"pad_token_id": 1}, 254),
        ("phi3 longrope", {}, 64),
        ("canine", {}, 256),  # which embeds characters, not tokens
    ):
        save(name, tmp_path / name, **settings)
        assert open_model(tmp_path / name).longest == longest


def test_settings_of_outputs_and_chunks_in_config_json_change_nothing(tmp_path: Path) -> None:
    """Old ones return tuples, or run MLPs on a few tokens at a time, of which one chunk would count."""
    for name, settings in (("llama", {"return_dict": False}), ("bert", {"chunk_size_feed_forward": 5})):
        save(name, tmp_path / name)
        groups = open_model(tmp_path / name).groups(0)
        edit_json(tmp_path / name / "config.json", **settings)
        model = open_model(tmp_path / name)
        assert model.groups(0) == groups
        if model.skeleton.generates:
            logits = torch.ones(1, model.vocabulary)
            assert torch.equal(model.finish(logits), logits)


def test_fused_layers_are_those_that_share_input_and_parent(tmp_path: Path) -> None:
    save("cohere", tmp_path)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    assert open_model(tmp_path).fused()[:4] == [
        [f"{attention}{x}_proj" for x in "qkv"],
        [f"{mlp}{x}_proj" for x in ("gate", "up")],
        [f"{attention}o_proj"],
        [f"{mlp}down_proj"],
    ]


# Models that cannot be run


SIZES = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
LLAMA4 = multimodal({**VISION, **SIZES}, num_local_experts=2, intermediate_size_mlp=96)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("mpnet", {}, "the blocks of MPNetModel read more than hidden states and positions"),
        ("clip", multimodal(VISION, model_type="clip_text_model"), r"cannot run CLIPModel on text \("),
        ("llama4", LLAMA4, r"cannot run Llama4ForConditionalGeneration on text \(AttributeError"),
    ],
)
def test_other_models_are_refused(kind: str, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    """MPNet's blocks share a bias that depends on weights; 5.24 looks for an image that Llama 4 was not given.

    CLIP does not say which module is its embedding.
    """
    save(kind, tmp_path, **settings)

    def logits() -> Tensor:
        model = open_model(tmp_path, untied=True)
        with model.checkpoint.reader() as reader:
            return model.ends(reader).logits(torch.zeros(1, 4, model.hidden))

    with pytest.raises(CalibrationError, match=rf"{words}.*without --calib"):
        logits()


# Changes of weights


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Return a function that opens a model of `ARCHITECTURES`, with an untied head."""

    @cache
    def opened(name: str) -> Model:
        save(name, folder := tmp_path_factory.mktemp("model"))
        return open_model(folder, untied=True)

    return opened


def assert_same_outputs(model: Model, reader: Reader, changed: Reader) -> None:
    assert any(not torch.equal(reader.whole(name), changed.whole(name)) for name in model.checkpoint.tensors)
    expected, actual = run(model, reader), run(model, changed)
    assert float((actual - expected).norm()) <= SAME * float(expected.norm())


def pairs_of(model: Model, reader: Reader) -> list[tuple[int, Pair]]:
    """Return the pairs of all blocks, with the blocks' numbers."""
    return [(i, pair) for i, roles in enumerate(roles_of(model, reader)) for pair in roles.pairs]


def obstacle_of(folder: Path) -> str | None:
    model = open_model(folder, untied=True)
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
            named = {
                model.skeleton.layer(number, layer) + kind: order for (layer, kind), order in orders.items()
            }
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
            model.skeleton.layer(number, pair.reader): 2.0
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
            rotation = some_rotation(model, roles)
            assert_same_outputs(model, reader, rotated_reader(reader, model, roles, rotation))


def test_rotation_obstacles_outside_of_blocks(tmp_path: Path) -> None:
    """Whatever else reads the residual stream: users of hidden states, and tensors that transformers ignores."""
    save("llama", source := tmp_path / "source")
    tensors, values = tensors_of(source), config_of(source)
    assert obstacle_of(write(source, values, {**tensors, "model.rotary_emb.inv_freq": torch.ones(8)})) is None
    write(source, values, {**tensors, "mtp.0.fc.weight": torch.ones(64, 128)})
    assert "mtp.0.fc.weight" in str(obstacle_of(source))
    write(source, values, tensors)
    (source / "modules.json").write_text("[]")
    assert "modules.json" in str(obstacle_of(source))


def test_untied_head_is_the_embedding_of_a_tied_model(tmp_path: Path) -> None:
    """A stored head of a tied model is ignored, as by transformers and vLLM; Gemma, tied by default, stays tied."""
    save("llama", tmp_path / "llama")
    edit_json(tmp_path / "llama" / "config.json", tie_word_embeddings=True)
    untied = open_model(tmp_path / "llama", untied=True)
    assert untied.checkpoint.config["tie_word_embeddings"] is False
    with untied.checkpoint.reader() as reader:
        assert torch.equal(reader.whole("lm_head.weight"), reader.whole("model.embed_tokens.weight"))
        assert torch.equal(run(untied, reader), logits_of(tmp_path / "llama"))
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
