"""The end-to-end benchmark: its plan, engines that take turns (a program stands in for vLLM), and the real one."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from models import QWEN, Decoder, write_config, write_w8a8
from safetensors.torch import load_file
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.e2e.plan import FLAGS, E2eError, Run, Workload, environment, find_model, runs
from benchmarks.e2e.run import RunError, check_log, read_figures
from slidesparse.cli.main import app as product
from slidesparse.resolve import SUMMARY

WIDE = Decoder("Qwen2ForCausalLM", hidden=256, intermediate=512, head_dim=64)


def one_run(folder: Path, stage: str = "prefill", system: str = "stock", m: int = 128) -> Run:
    model = find_model(write_config(folder / "m", "6:8"))
    return runs([model], (stage,), {stage: (m,)}, (system,), None, 1, Workload(prompt=8))[0]


def test_each_system_has_its_flags_and_no_others() -> None:
    users = dict.fromkeys(FLAGS, "set by the user") | {"VLLM_PLUGINS": "other,slidesparse"}
    assert environment("stock", users) == environment("bf16", users) == {"VLLM_PLUGINS": "other"}
    assert "slidesparse" not in environment("stock", {})["VLLM_PLUGINS"].split(",")
    sparse = {"VLLM_PLUGINS": "other,slidesparse", "USE_CUSPARSELT": "1"}
    assert environment("sparse", users) == sparse
    assert environment("unfused", users) == {**sparse, "SLIDESPARSE_FUSE": "0"}
    assert environment("dense", {}) == {"SLIDESPARSE": "auto"}


def test_steps_have_m_tokens(tmp_path: Path) -> None:
    """Prefill is bounded by the token budget, decode by the number of sequences."""
    work = Workload()
    cells = [("prefill", 512), ("prefill", 65536), ("decode", 512)]
    small, large, decode = (work.sizes(*cell)[0] for cell in cells)
    assert (small.prompt, small.prompts, small.batched, small.output) == (512, 128, 512, 1)
    assert (large.prompt, large.prompts, large.batched) == (1024, 128 * 64, 65536)
    assert large.sequences >= 2 * 64
    assert (decode.sequences, decode.prompts, decode.output, decode.batched) == (512, 512, 256, 512 * 16)
    longer = Workload(contexts=(16, 8192)).sizes("decode", 32)
    assert [(size.prompt, size.batched) for size in longer] == [(16, 512), (8192, 16384)]
    assert all(work.sizes("prefill", m)[0].sequences <= m for m in (1, 64, 1024))  # else vLLM refuses
    with pytest.raises(E2eError, match="1536"):
        work.sizes("prefill", 1536)
    with pytest.raises(E2eError, match=r"513.*512"):  # more tokens than the model has positions
        runs(
            [find_model(write_config(tmp_path / "m", "6:8"))],
            ("prefill",),
            {"prefill": (512,)},
            ("stock",),
            None,
            1,
            work,
        )


def test_folders_become_systems_and_patterns(tmp_path: Path) -> None:
    """Dense systems run the unpruned checkpoint; folders that are not W8A8 are systems of their name."""
    for pattern in ("dense", "6:8", "2:4", "bf16"):
        write_config(tmp_path / "qwen" / pattern, None if pattern in ("dense", "bf16") else pattern)
    config = tmp_path / "qwen" / "bf16" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": None}))
    model = find_model(tmp_path / "qwen")
    assert (model.name, model.dtype, model.dense.folder.name) == ("qwen", "int8", "dense")
    fp8 = find_model(write_config(tmp_path / "qwen-fp8", None, "fp8"), "qwen")
    systems = ("stock", "bf16", "sparse")
    planned = runs([model, fp8], ("decode",), {"decode": (1,)}, systems, None, 2, Workload())
    forward = [("int8", "stock", "dense"), ("fp8", "stock", "qwen-fp8"), ("int8", "bf16", "bf16")]
    forward += [("int8", "sparse", "2:4"), ("int8", "sparse", "6:8")]
    found = [(run.dtype, run.system, run.variant.folder.name) for run in planned]
    assert (found, {run.model for run in planned}) == ([*forward, *forward[::-1]], {"qwen"})
    for wrong in ("fp4", "cusparselt"):
        with pytest.raises(E2eError, match="fp4|no checkpoint of 4:6"):
            runs([model], ("decode",), {"decode": (1,)}, (wrong,), ("4:6",), 1, Workload())
    assert find_model(write_config(tmp_path / "llama-2_6", "4:6")).name == "llama"
    write_config(tmp_path / "bad" / "2_8", "4:6")
    with pytest.raises(E2eError, match=r"named 2_8, but was pruned to 4:6"):
        find_model(tmp_path / "bad")


def test_figures_of_another_run_are_refused(tmp_path: Path) -> None:
    run = one_run(tmp_path)  # 128 steps of 16 prompts of 8 tokens, at most 128 tokens each
    valid = {"elapsed_time": 2.0, "num_requests": 2048, "total_num_tokens": 2048 * 9}
    rate, nothing = 2048 * 9 / 2, {"watts": None, "steps": []}
    unknown = {"step_ms": None, "tokens_per_s": rate, "tokens_per_joule": None}
    assert read_figures(run, valid, nothing) == unknown
    # medians are of steps of M tokens after another one: 0.25, 0.5 and 0.125
    steps = [(128, 0.9), (128, 0.25), (128, 0.5), (128, 0.125), (64, 0.0625), (128, 0.75)]
    figures = {"step_ms": 250.0, "tokens_per_s": rate, "tokens_per_joule": rate / 64}
    assert read_figures(run, valid, {"watts": 64.0, "steps": steps}) == figures
    changes = (
        {"num_requests": 2047},
        {"elapsed_time": 0.0},
        {"elapsed_time": "soon"},
        {"total_num_tokens": 2048},
    )
    for change in changes:  # the last one: its prompts were too short
        with pytest.raises(RunError):
            read_figures(run, valid | change, nothing)
    decode = one_run(tmp_path / "decode", "decode", m=64)  # only output tokens: 256 per sequence
    assert read_figures(decode, valid | {"num_requests": 64}, nothing)["tokens_per_s"] == 64 * 256 / 2


def test_log_identifies_the_system(tmp_path: Path) -> None:
    def line(path: str, pattern: str, layers: int = 8) -> str:
        facts = {"path": path, "pattern": pattern, "layers": {pattern: layers}, "words": "w"}
        return f"INFO {SUMMARY}{json.dumps(facts)}\nmore"

    right = {"stock": "", "cublaslt": line("dense", "6:8"), "dense": line("sparse", "dense")}
    right["sparse"] = line("sparse", "6:8")
    for system, own in right.items():
        run = one_run(tmp_path / system, system=system)
        assert check_log(run, own) == ("" if system == "stock" else "w")
        for text in {*right.values(), line("sparse", "6:8", 0), line("sparse", "4:6")} - {own}:
            with pytest.raises(RunError):
                check_log(run, text)


@pytest.mark.vllm
@pytest.mark.parametrize("fp8", [False, True])
def test_four_bit_twin_of_a_w8a8_checkpoint(tmp_path: Path, fp8: bool) -> None:
    """Each linear layer has packed codes and scales of groups, as compressed-tensors reads them; all else is copied."""
    from compressed_tensors.compressors import unpack_from_int32
    from compressed_tensors.quantization import QuantizationConfig

    source = write_w8a8(WIDE, tmp_path / "dense")
    assert CliRunner().invoke(app, ["w4", str(source), str(tmp_path / "w4"), *["--fp8"] * fp8]).exit_code == 0
    block = json.loads((tmp_path / "w4" / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(block).config_groups.values()
    assert (scheme.weights.num_bits, scheme.weights.group_size) == (4, 128)
    assert (scheme.input_activations and scheme.input_activations.dynamic) == (fp8 or None)
    old, new = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "w4"))
    layers = WIDE.linears()
    for name, shape in layers.items():
        codes = unpack_from_int32(new[f"{name}.weight_packed"], 4, torch.Size(shape))
        assert (int(codes.min()), int(codes.max()), tuple(new[f"{name}.weight_scale"].shape)) == (
            *(-8, 7),
            (shape[0], shape[1] // 128),
        )
    others = {name for name in old if name.rpartition(".")[0] not in layers or name.endswith("bias")}
    assert all(torch.equal(old[name], new[name]) for name in others)
    assert find_model(tmp_path).others.keys() == {"w4"}


@pytest.mark.vllm
@pytest.mark.slow
def test_e2e_with_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in steps of 32 tokens and decode of 4 sequences, by the plugin."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for name, value in (settings | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.json").write_text(json.dumps(QWEN.config()))
    made = CliRunner().invoke(
        product, ["synth", str(tmp_path), str(tmp_path / "tiny-2_8"), "--sparsity", "6:8"]
    )
    assert made.exit_code == 0, made.output
    options = ["--model", str(tmp_path / "tiny-2_8"), "--out", str(tmp_path), "--m", "32", "--decode-m", "4"]
    options += ["--prompt", "16", "--prefill-steps", "4", "--decode-steps", "8", "--systems", "sparse"]
    result = CliRunner().invoke(app, ["e2e", *options, "--rounds", "1", "--vllm-args", "--enforce-eager"])
    assert result.exit_code == 0, result.output
    with (tmp_path / "e2e.csv").open(newline="") as file:
        prefill, decode = csv.DictReader(file)
    assert (prefill["model"], prefill["pattern"], decode["stage"]) == ("tiny", "6:8", "decode")
    assert float(prefill["step_ms"]) > 0 < float(decode["step_ms"])
    figures = json.loads(next((tmp_path / "logs").glob("*prefill*.json")).read_text())
    assert figures["total_num_tokens"] == 4 * 2 * (16 + 1)  # two prompts per step
    assert "8 layers sparse" in json.loads((tmp_path / "e2e.json").read_text())["tiny int8 6:8 sparse"]
