"""``slidesparse convert`` with calibration data: the whole way from float weights to a checkpoint read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration import LINEARS, SIX_EIGHT, TOKENS, calibrated, write_ids
from checkpoints import DOWN, LLAMA, Q, bert, config_of, edit_json, llama, snapshot, tensors_of, w8a8
from strategies import NAMED, assert_same_bits

from slidesparse.calibrate import pipeline, work
from slidesparse.calibrate.run import Calibration, worst_layers
from slidesparse.convert import Report, convert
from slidesparse.inspection import inspect, verify
from slidesparse.metadata import Metadata
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import dequantize_rows, quantize_rows
from slidesparse.slide import violations


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "source")


@pytest.fixture
def ids(tmp_path: Path) -> str:
    return write_ids(tmp_path / "ids.npy")


def errors(report: Report) -> dict[str, float]:
    return {row["name"]: row["error_quantized"] for row in report.layers}


@pytest.mark.parametrize("ratio", NAMED)
@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
def test_every_pattern(source: Path, tmp_path: Path, ids: str, ratio: str, method: str) -> None:
    """K is 64 and 88: most patterns leave a tail.  Every tensor-parallel shard obeys with its phase."""
    pattern = SlidePattern.parse(ratio)
    quant = "fp8" if NAMED.index(ratio) % 2 else "int8"
    report = calibrated(source, tmp_path / "out", ids, pattern=pattern, method=method, quant=quant)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert sorted(report.pruned) == LINEARS
    for name in LINEARS:
        codes = after[f"{name}.weight"]
        assert violations(codes, pattern) is None
        for tp in (2, 4, 8):
            for columns in torch.arange(codes.shape[1]).tensor_split(tp):
                start, stop = int(columns[0]), int(columns[-1]) + 1
                shard = codes[:, start:stop].contiguous()
                assert violations(shard, pattern, pattern.shard_phase(start)) is None
    for name, tensor in before.items():
        if name.removesuffix(".weight") not in LINEARS:
            assert_same_bits(after[name], tensor)  # lm_head, embeddings, norms
    assert inspect(tmp_path / "out").violations == 0
    for row in report.layers:
        shape = LLAMA.linears()[row["name"]]
        assert (row["out_features"], row["in_features"]) == shape
        assert (row["violations"], row["dead_columns"], row["method"]) == (0, 0, method)
        assert row["tokens"] == TOKENS[0] * TOKENS[1]
        assert 0 < row["scale_min"] <= row["scale_max"]
        assert ratio == "2_inf" or 0 < row["error_pruned"] <= row["error_quantized"] * 1.01 < 1
        zeros = int((after[f"{row['name']}.weight"].float() == 0).sum())
        assert row["zeros"] == zeros
    assert not work.work_folder(tmp_path / "out").exists()


def test_an_encoder_and_its_texts(tmp_path: Path) -> None:
    source = bert(tmp_path / "source")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    edit_json(source / "config.json", **sizes, vocab_size=50, max_position_embeddings=16, hidden_act="gelu")
    generator = torch.Generator().manual_seed(0)
    tensors = tensors_of(source)
    norms = [
        "embeddings",
        *(f"encoder.layer.{i}.{n}" for i in range(2) for n in ("attention.output", "output")),
    ]
    for norm in norms:
        tensors |= {f"{norm}.LayerNorm.weight": torch.ones(32), f"{norm}.LayerNorm.bias": torch.zeros(32)}
    tensors["embeddings.position_embeddings.weight"] = torch.randn(16, 32, generator=generator)
    tensors["embeddings.token_type_embeddings.weight"] = torch.randn(2, 32, generator=generator)
    from checkpoints import write

    write(source, config_of(source), tensors)
    words = {f"w{i}": i for i in range(50)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    splitter = {"type": "WhitespaceSplit"}
    (source / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": splitter, "model": model})
    )
    texts = [" ".join(f"w{(i * j) % 50}" for j in range(2, 4 + i % 12)) for i in range(40)]
    calib = tmp_path / "calib.jsonl"
    calib.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    report = calibrated(source, tmp_path / "out", str(calib), seqlen=None, samples=30)
    assert len(report.pruned) == 12
    assert report.samples.startswith("calib.jsonl, 30 samples, ")
    assert all(0 < row["block_error_finetuned"] <= row["block_error"] < 1 for row in report.layers)
    assert inspect(tmp_path / "out").violations == 0
    by_magnitude = calibrated(source, tmp_path / "m", str(calib), seqlen=None, samples=30, method="magnitude")
    assert sum(errors(report).values()) < 0.8 * sum(errors(by_magnitude).values())


def test_methods_in_order_and_sweeps_help(source: Path, tmp_path: Path, ids: str) -> None:
    runs = {"sparsegpt": {}, "alone": {"sweeps": 0}, "wanda": {}, "magnitude": {}}
    total = {}
    for name, options in runs.items():
        method = "sparsegpt" if name == "alone" else name
        report = calibrated(source, tmp_path / name, ids, method=method, **options)
        total[name] = sum(errors(report).values())
    assert list(total) == sorted(total, key=total.__getitem__), total
    assert report.sensitivity == sorted(errors(report), key=errors(report).__getitem__, reverse=True)


def test_magnitude_chooses_what_it_does_without_calibration(source: Path, tmp_path: Path, ids: str) -> None:
    calibrated(source, tmp_path / "with", ids, method="magnitude")
    convert(source, tmp_path / "without", pattern=SIX_EIGHT)
    assert snapshot(tmp_path / "with") == snapshot(tmp_path / "without")


def test_errors_in_the_report_are_those_of_the_first_layer(source: Path, tmp_path: Path, ids: str) -> None:
    """The inputs of layer 0's q_proj do not depend on pruning: normed embeddings, which are easy to make here."""
    (row,) = (
        row
        for row in calibrated(source, tmp_path / "out", ids, finetune=0).layers
        if row["name"] == "model.layers.0.self_attn.q_proj"
    )
    tensors, after = tensors_of(source), tensors_of(tmp_path / "out")
    x = tensors["model.embed_tokens.weight"].double()[torch.from_numpy(np.load(ids)).flatten()]
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    w = tensors[f"{row['name']}.weight"].double()
    served = dequantize_rows(after[f"{row['name']}.weight"], after[f"{row['name']}.weight_scale"]).double()
    expected = float((x @ (w - served).t()).norm() / (x @ w.t()).norm())
    assert row["error_quantized"] == pytest.approx(expected, rel=1e-4)  # H and its products are float32


def test_later_layers_see_the_pruned_ones_before(source: Path, tmp_path: Path, ids: str) -> None:
    """Layer 1's inputs, and so its weights, depend on what became of layer 0."""
    calibrated(source, tmp_path / "all", ids)
    calibrated(source, tmp_path / "last", ids, skip=[r"layers\.0\."])
    first, second = tensors_of(tmp_path / "all"), tensors_of(tmp_path / "last")
    assert not torch.equal(first[f"{Q}.weight"], second[f"{Q}.weight"])


def test_the_slided_layout_holds_the_same(source: Path, tmp_path: Path, ids: str) -> None:
    for layout in ("dense", "slided"):
        calibrated(source, tmp_path / layout, ids, layout=layout, layer=["down_proj=8:10"])
    assert verify(tmp_path / "dense", tmp_path / "slided").equal


def test_spilled_hidden_states_change_nothing(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(source, tmp_path / "memory", ids)
    monkeypatch.setattr("slidesparse.calibrate.cache.MEMORY_BYTES", 0)
    calibrated(source, tmp_path / "disk", ids)
    assert snapshot(tmp_path / "disk") == snapshot(tmp_path / "memory")


@pytest.mark.gpu
def test_inputs_kept_on_the_gpu_change_nothing(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept between stages, or computed anew for each; hidden states on the GPU or on the disk."""
    calibrated(source, tmp_path / "kept", ids, device="cuda")
    monkeypatch.setattr("slidesparse.calibrate.cache.KEPT_SHARE", 2**60)
    calibrated(source, tmp_path / "anew", ids, device="cuda")
    monkeypatch.setattr("slidesparse.calibrate.cache.DEVICE_SHARE", 2**60)
    monkeypatch.setattr("slidesparse.calibrate.cache.MEMORY_BYTES", 0)
    calibrated(source, tmp_path / "disk", ids, device="cuda")
    assert snapshot(tmp_path / "kept") == snapshot(tmp_path / "anew") == snapshot(tmp_path / "disk")
    assert inspect(tmp_path / "kept").violations == 0


def test_no_more_than_a_layer_is_in_memory(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    load = pipeline.Model.load

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal most
        block = load(self, *arguments)
        alive.extend(weakref.ref(tensor) for tensor in block.weights.values())
        most = max(most, sum(found.nbytes for ref in alive if (found := ref()) is not None))
        return block

    monkeypatch.setattr(pipeline.Model, "load", counted)
    calibrated(source, tmp_path / "out", ids)
    one = sum(4 * tensor.numel() for name, tensor in tensors_of(source).items() if ".layers.0." in name)
    assert most <= 2 * one  # the next layer is read while the name of the last still stands


# Which layers, and how


def test_mixed_patterns(source: Path, tmp_path: Path, ids: str) -> None:
    rules = ["down_proj=8:10", r"layers\.1\..*down_proj=14:16", "gate_proj|up_proj=4:6"]
    for name, make in (("calibrated", lambda out: calibrated(source, out, ids, layer=rules)),
                       ("magnitude", lambda out: convert(source, out, pattern=SIX_EIGHT, layer=rules))):  # fmt: skip
        report = make(tmp_path / name)
        ratios = {layer: pattern.ratio for layer, pattern in report.patterns.items()}
        assert ratios[DOWN] == "8:10"
        assert ratios["model.layers.1.mlp.down_proj"] == "14:16"
        assert ratios["model.layers.1.mlp.gate_proj"] == "4:6"
        assert ratios[Q] == "6:8"
        metadata = Metadata.of_config(config_of(tmp_path / name)["quantization_config"])
        assert metadata is not None
        assert metadata.pattern == SIX_EIGHT
        assert {layer: entry.pattern.ratio for layer, entry in metadata.layers.items()} == ratios
        for layer, ratio in ratios.items():
            weight = tensors_of(tmp_path / name)[f"{layer}.weight"]
            assert violations(weight, SlidePattern.parse(ratio)) is None
        convert(tmp_path / name, tmp_path / f"{name} slided", pattern=SIX_EIGHT, layout="slided")
        assert verify(tmp_path / name, tmp_path / f"{name} slided").equal


def test_skipped_layers_are_quantized_and_not_pruned(source: Path, tmp_path: Path, ids: str) -> None:
    dense = SlidePattern(None)
    convert(source, tmp_path / "quantized", pattern=dense)
    expected = tensors_of(tmp_path / "quantized")
    for name, options in (("calibrated", {"calibration": Calibration(ids, seqlen=24)}), ("plain", {})):
        report = convert(source, tmp_path / name, pattern=SIX_EIGHT, skip=["o_proj", r"1.*down"], **options)
        assert report.skipped == dict.fromkeys(
            [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)] + ["model.layers.1.mlp.down_proj"],
            "--skip",
        )
        found, block = tensors_of(tmp_path / name), config_of(tmp_path / name)["quantization_config"]
        for layer in report.skipped:
            assert_same_bits(found[f"{layer}.weight"], expected[f"{layer}.weight"])
            assert_same_bits(found[f"{layer}.weight_scale"], expected[f"{layer}.weight_scale"])
            assert layer not in block["slidesparse"]["layers"]
        assert block["ignore"] == ["lm_head"]
        slided = tmp_path / f"{name} slided"
        convert(tmp_path / name, slided, pattern=SIX_EIGHT, layout="slided")
        assert verify(tmp_path / name, slided).equal


def test_skipping_a_w8a8_source_keeps_its_codes(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    report = convert(source, tmp_path / "out", pattern=SIX_EIGHT, skip=["o_proj"])
    assert len(report.skipped) == 2
    for layer in report.skipped:
        assert_same_bits(
            tensors_of(tmp_path / "out")[f"{layer}.weight"], tensors_of(source)[f"{layer}.weight"]
        )


def test_the_worst_layers_are_skipped(source: Path, tmp_path: Path, ids: str) -> None:
    report = calibrated(source, tmp_path / "out", ids, skip_worst="30%")
    assert set(report.skipped.values()) == {"--skip-worst"}
    assert 1 <= len(report.skipped) <= 0.3 * len(LINEARS)
    ranked = calibrated(source, tmp_path / "wanda", ids, method="wanda").sensitivity
    assert set(report.skipped) & set(ranked[:5])
    assert not set(report.skipped) & set(report.pruned)
    assert inspect(tmp_path / "out").violations == 0


def test_worst_layers_go_in_whole_groups() -> None:
    groups = [("a.q", "a.k", "a.v"), ("a.g", "a.u")]
    found = {"a.q": 0.1, "a.k": 0.9, "a.v": 0.1, "a.g": 0.5, "a.u": 0.4, "a.o": 0.6, "a.d": 0.2}
    assert worst_layers(found, groups, 0.01) == {"a.q", "a.k", "a.v"}  # at least one group
    assert worst_layers(found, groups, 4 / 7) == {"a.q", "a.k", "a.v", "a.o"}
    assert worst_layers(found, groups, 0.99) == {"a.q", "a.k", "a.v", "a.o", "a.g", "a.u"}


def test_lm_head_and_embeddings_are_left_alone_whatever_matches(
    source: Path, tmp_path: Path, ids: str
) -> None:
    report = calibrated(source, tmp_path / "out", ids, linear="proj|lm_head|embed")
    assert sorted(report.pruned) == LINEARS
    assert (
        convert(source, tmp_path / "m", pattern=SIX_EIGHT, linear="proj|lm_head|embed").pruned
        == report.pruned
    )


def test_check_reads_back_without_calibration(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", pattern=SIX_EIGHT, check=True)
    (row,) = (row for row in report.layers if row["name"] == Q)
    codes, scale = quantize_rows(prune(tensors_of(source)[f"{Q}.weight"], SIX_EIGHT), torch.int8)
    assert row["zeros"] == int((codes == 0).sum())
    assert (row["scale_min"], row["scale_max"]) == (float(scale.min()), float(scale.max()))
    assert (row["method"], row["error_pruned"], report.sensitivity) == ("magnitude", None, [])


def test_columns_that_the_source_has_not_are_not_called_dead(tmp_path: Path) -> None:
    weight = tensors_of(llama(tmp_path / "first"))[f"{Q}.weight"]
    weight[:, 5] = 0
    source = llama(tmp_path / "source", **{f"{Q}.weight".replace(".", "__"): weight})
    report = convert(source, tmp_path / "out", pattern=SIX_EIGHT, check=True)
    assert [row["dead_columns"] for row in report.layers] == [0] * len(LINEARS)
    weight = torch.full((64, 64), 1.0).bfloat16()
    weight[:, 8] = 1e-3  # the smallest of its block in each row
    source = llama(tmp_path / "other", **{f"{Q}.weight".replace(".", "__"): weight})
    report = convert(source, tmp_path / "again", pattern=SIX_EIGHT, check=True)
    assert {row["dead_columns"] for row in report.layers if row["name"] == Q} == {16}  # ties: the leftmost go
