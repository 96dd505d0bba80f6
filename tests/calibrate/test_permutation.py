"""Permutation of channels to reduce the cost of pruning, which keeps the model's outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibration import calibrated, random_model, write_ids
from checkpoints import DOWN, bert, llama, tensors_of, write
from safetensors.torch import save_file

from slidesparse.calibrate import permutation
from slidesparse.calibrate.inputs import BlockInputs, HiddenStates, gather_statistics
from slidesparse.calibrate.models import DECODERS, Block, open_model
from slidesparse.calibrate.permutation import (
    COLUMNS,
    ROWS,
    OrderedReader,
    arrange_columns,
    find_order,
    layer_orders,
    may_permute,
)
from slidesparse.calibrate.resume import WorkFolder
from slidesparse.calibrate.task import Task
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.convert import stream
from slidesparse.methods import get
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import NAMES, quantize_rows

CPU = torch.device("cpu")


@pytest.fixture
def unrotated(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Disable rotation and smoothing; return the options with which a Llama is permuted."""
    monkeypatch.setattr(stream, "rotation_obstacle", lambda _: "not in this test")
    monkeypatch.setattr(Task, "smooths", False)
    return {"rotate": "auto"}


COMMON = {
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "heads share values": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "joined": ("Phi3ForCausalLM", "Phi3Config", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "encoder": ("BertModel", "BertConfig", {}),
}


def order_of(block: Block, stage: int, length: int) -> torch.Tensor:
    """Return the order for the source's weights with uncorrelated inputs."""
    w = block.weights[f"{block.stages[stage][0]}.weight"]
    return find_order(block, stage, w, torch.eye(w.shape[1]), length)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_permutation_keeps_model_outputs(name: str, tmp_path: Path) -> None:
    kind, config, settings = MODELS[name]
    reference = random_model(kind, config, {**COMMON, **settings})
    reference.save_pretrained(tmp_path / "source")
    model, work = open_model(Checkpoint.open(tmp_path / "source")), WorkFolder(tmp_path)
    with model.checkpoint.reader() as reader:
        for number in range(model.blocks):
            block, block_orders = model.load(reader, number, CPU), dict[str, torch.Tensor]()
            for stage in (1, 3):
                order = order_of(block, stage, 8)
                assert not torch.equal(order, torch.arange(len(order)))
                orders = layer_orders(block, stage, order)
                block_orders |= {model.prefix(number) + key: channels for key, channels in orders.items()}
            work.save(number, block_orders, [])
        with work.tensors().reader() as permutations:
            ordered = OrderedReader(reader, permutations)
            tensors = {key: ordered.whole(key).contiguous() for key in model.checkpoint.tensors}
    out = write(tmp_path / "out", model.checkpoint.config, tensors)
    reloaded = getattr(transformers, kind).from_pretrained(out, dtype=torch.float32)
    ids = torch.randint(3, 100, (2, 50), generator=torch.Generator().manual_seed(1))
    expected, actual = (m(ids, output_hidden_states=True).hidden_states for m in (reference, reloaded))
    for reference_state, state in zip(expected, actual, strict=True):
        assert float((reference_state - state).abs().max()) <= 200 * 2**-24 * float(
            reference_state.abs().max()
        )


def test_reader_reads_permuted_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight is read once, whatever other reads come between its chunks."""
    model, work = open_model(Checkpoint.open(llama(tmp_path / "source"))), WorkFolder(tmp_path)
    with model.checkpoint.reader() as reader:
        orders = layer_orders(block := model.load(reader, 0, CPU), 3, order_of(block, 3, 8))
        work.save(0, {model.prefix(0) + key: channels for key, channels in orders.items()}, [])
        with work.tensors().reader() as permutations:
            ordered = OrderedReader(reader, permutations)
            gate, up, norm = (
                model.prefix(0) + f"{key}.weight"
                for key in ("mlp.gate_proj", "mlp.up_proj", "input_layernorm")
            )
            expected = {name: ordered.rows(name, slice(0, 88)) for name in (gate, up)}
            ordered, reads = OrderedReader(reader, permutations), list[str]()
            rows = reader.rows
            monkeypatch.setattr(reader, "rows", lambda name, part: (reads.append(name), rows(name, part))[1])
            for start in range(0, 88, 8):
                for name in (gate, norm, up):
                    part = slice(start, start + 8)
                    chunk = ordered.rows(name, part if name != norm else slice(0, 1))
                    assert name == norm or torch.equal(chunk, expected[name][part])
    assert (reads.count(gate), reads.count(up)) == (1, 1)


def test_may_permute_refuses_unsafe_orders(tmp_path: Path) -> None:
    """Unsafe orders are of channels that a norm spans, or of heads whose blocks start at different offsets."""
    model = open_model(Checkpoint.open(llama(tmp_path / "source")))
    with model.checkpoint.reader() as reader:
        block = model.load(reader, 0, CPU)
    assert not may_permute(block, 0, 8)
    assert may_permute(block, 3, 6)
    assert may_permute(block, 1, 8)
    assert not may_permute(block, 1, 6)  # two heads of 32 channels share a value head
    block.sizes = replace(block.sizes, decoder=DECODERS["BitNet"])
    assert not may_permute(block, 1, 8)
    assert not may_permute(block, 3, 8)


@pytest.mark.parametrize(
    ("columns", "length", "region"), [(88, 8, 88), (88, 6, 88), (86, 8, 86), (64, 6, 32)]
)
def test_arrange_columns_reduces_the_cost(columns: int, length: int, region: int) -> None:
    """Half of the columns are large; the last block may be short, and columns stay in their region."""
    torch.manual_seed(0)
    scores = torch.rand(40, columns) * torch.where(torch.arange(columns) % region < region // 2, 100.0, 1.0)
    order = arrange_columns(scores, length, region)
    assert torch.equal(order.sort().values, torch.arange(columns))
    assert torch.equal(order // region, torch.arange(columns) // region)
    assert torch.equal(order, arrange_columns(scores, length, region))

    def cost(x: torch.Tensor) -> float:
        lost = 0.0
        for start in range(0, columns, length):
            block = x[:, start : start + length]
            surplus = block.shape[1] - (length - 2)
            lost += float(block.sort(1).values[:, : max(0, surplus)].sum())
        return lost

    assert cost(scores[:, order]) < 0.25 * cost(scores)


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_permuted_codes_are_written_in_the_pruned_order(
    tmp_path: Path, unrotated: dict[str, Any], quant: str
) -> None:
    """Only down is pruned: gate's codes reveal the order, by which down's codes can be recomputed."""
    source, ids = llama(tmp_path / "source"), write_ids(tmp_path / "ids.npy")
    options = {"skip": [r"(q|k|v|o|gate|up)_proj"], "finetune": 0, "target": "own", **unrotated}
    calibrated(source, tmp_path / "out", ids, quant=quant, **options)
    original, converted = tensors_of(source), tensors_of(tmp_path / "out")
    layer = "model.layers.0.mlp."
    quantized = {
        name: quantize_rows(original[f"{layer}{name}.weight"], NAMES[quant], "cuda")
        for name in ("gate_proj", "up_proj")
    }
    codes = converted[f"{layer}gate_proj.weight"].float()
    is_equal = (quantized["gate_proj"][0].float()[None] == codes[:, None]).all(-1)
    assert torch.equal(is_equal.sum(1), torch.ones(88))
    order = is_equal.int().argmax(1)
    assert not torch.equal(order, torch.arange(88))
    for name, (weight, scale) in quantized.items():
        assert torch.equal(converted[f"{layer}{name}.weight"].float(), weight.float()[order])
        assert torch.equal(converted[f"{layer}{name}.weight_scale"], scale[order])
    model = open_model(Checkpoint.open(source))
    tokens = torch.from_numpy(np.load(ids))
    with model.checkpoint.reader() as reader, torch.inference_mode():
        block = model.load(reader, 0, CPU)
        for stage in block.stages[:3]:
            for name in stage:
                w, scale = quantize_rows(block.weights[f"{name}.weight"], NAMES[quant], "cuda")
                block.weights[f"{name}.weight"] = w.float() * scale
        for name in ("gate_proj", "up_proj"):
            for kind in ("weight", "bias"):
                if f"mlp.{name}.{kind}" in block.weights:
                    block.weights[f"mlp.{name}.{kind}"] = block.weights[f"mlp.{name}.{kind}"][order]
        states = HiddenStates([(*tokens.shape, model.hidden)], CPU, tmp_path)
        states[0] = model.embedder(reader, list(tokens), CPU)(tokens)
        hessian, _ = gather_statistics(BlockInputs(block, states, keep=False), 3)
        pruner = get("sparsegpt").calibrated(hessian.matrix, hessian.tokens, 4)
        down = pruner(block.weights["mlp.down_proj.weight"][:, order], SlidePattern(8), None)
    expected, scale = quantize_rows(down, NAMES[quant], "cuda")
    weight_down = converted[f"{layer}down_proj.weight"].float() * converted[f"{layer}down_proj.weight_scale"]
    # another order of summation in H may change a close choice
    assert float((weight_down - expected.float() * scale).norm() / weight_down.norm()) < 0.02
    assert inspect(tmp_path / "out").violations == 0


def test_permutation_reduces_errors(
    tmp_path: Path, unrotated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns differ in magnitude, as in trained models."""
    source, ids = llama(tmp_path / "source"), write_ids(tmp_path / "ids.npy", 60)
    tensors = tensors_of(source)
    torch.manual_seed(0)
    for name in [n for n in tensors if n.endswith("down_proj.weight")]:
        tensors[name] = (tensors[name].float() * torch.randn(88).exp()).bfloat16()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with_order = calibrated(source, tmp_path / "with", ids, finetune=0, samples=60, **unrotated)
    monkeypatch.setattr(permutation, "ROUNDS", 0)
    without = calibrated(source, tmp_path / "without", ids, finetune=0, samples=60, **unrotated)
    skipped = calibrated(source, tmp_path / "off", ids, finetune=0, samples=60, rotate="off")
    assert [row["error_pruned"] for row in skipped.layers] == [row["error_pruned"] for row in without.layers]
    actual, expected = ({row["name"]: row["error_pruned"] for row in r.layers} for r in (with_order, without))
    assert actual[DOWN] < 0.97 * expected[DOWN]


def test_permutation_of_an_encoder_is_consistent(tmp_path: Path) -> None:
    """Codes, scales and biases of the layer that writes the channels have the same order."""
    source, calib = bert(tmp_path / "source"), tmp_path / "calib.jsonl"
    texts = [" ".join(f"w{(i * j) % 50}" for j in range(2, 4 + i % 12)) for i in range(40)]
    calib.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    calibrated(source, tmp_path / "out", str(calib), seqlen=None, samples=30, rotate="auto")
    original, converted = tensors_of(source), tensors_of(tmp_path / "out")
    for name in (f"encoder.layer.{i}.intermediate.dense.bias" for i in range(2)):
        assert not torch.equal(original[name], converted[name])
        assert torch.equal(original[name].sort().values, converted[name].sort().values)
    assert not any(name.endswith((ROWS, COLUMNS)) for name in converted)
    assert inspect(tmp_path / "out").violations == 0
