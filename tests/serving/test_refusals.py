"""Real vLLM refuses invalid checkpoints and flags in one line with the layer or field, and counts what it leaves."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import block_of, converted, tensors_of
from edits import SPARSE_FLAGS, edited, refused
from engines import STOCK, Engines, Request
from models import QWEN, write_float, write_w8a8
from safetensors.torch import load_file
from torch import Tensor

from slidesparse.checkpoint.converted import open_checkpoint, restore
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.errors import CheckFailed
from slidesparse.evaluate.engine import summaries
from slidesparse.pattern import parse_pattern
from slidesparse.prune import prune
from slidesparse.slide import slide

pytestmark = pytest.mark.vllm

DOWN, K_PROJ = "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.k_proj"
QKV = "model.layers.1.self_attn.qkv_proj"
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """One model as BF16, as unpruned W8A8, and at 6:8 in all layouts; and an FP8 one."""
    folder = tmp_path_factory.mktemp("checkpoints")
    w8a8 = write_w8a8(QWEN, folder / "w8a8")
    layouts = {kind: converted(w8a8, folder / kind, "6:8", kind) for kind in ("dense", "slided", "packed")}
    fp8 = converted(write_w8a8(QWEN, folder / "fp8-source", "fp8"), folder / "fp8", "6:8")
    ignored = write_w8a8(QWEN, folder / "ignored", floats=tuple(QWEN.linears()))
    floats = {"float": write_float(QWEN, folder / "float"), "ignored": ignored}
    return {**floats, "w8a8": w8a8, "fp8": fp8, **layouts}


def group(folder: Path, **changes: Any) -> dict[str, Any]:
    """The config groups of a checkpoint with changes."""
    return {"config_groups": {"group_0": {**block_of(folder)["config_groups"]["group_0"], **changes}}}


def static_alone(folder: Path) -> dict[str, Any]:
    activations = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
    return {"slidesparse": None, **group(folder, input_activations=activations)}


def mixed_types(folder: Path) -> dict[str, Any]:
    activations = block_of(folder)["config_groups"]["group_0"]["input_activations"]
    return {"slidesparse": None, **group(folder, input_activations={**activations, "type": "int"})}


# Changes of a tensor: None removes it


def holed(rows: slice) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[rows].contiguous()


def nan(tensor: Tensor) -> Tensor:
    tensor[3] = float("nan")
    return tensor


def full(*places: tuple[int, slice]) -> Callable[[Tensor], Tensor]:
    """Fill columns of rows with ones."""

    def change(tensor: Tensor) -> Tensor:
        for row, columns in places:
            tensor[row, columns] = 1
        return tensor

    return change


def ones(_: Tensor) -> Tensor:
    """A weight of DOWN beside a packed one: vLLM would keep the one that it loads last."""
    return torch.ones(QWEN.hidden, QWEN.intermediate, dtype=torch.int8)


def in_two_windows(tensor: Tensor) -> Tensor:
    """Each of the two windows obeys 2:4."""
    tensor[3, :12] = 0
    tensor[3, 2] = tensor[3, 4] = 1
    return tensor


def coded(code: int) -> Callable[[Tensor], Tensor]:
    """Replace the first FP8 code of a row."""

    def change(tensor: Tensor) -> Tensor:
        row = tensor[3].view(torch.uint8)
        row[int(row.nonzero()[0])] = code
        return tensor

    return change


def metadata(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], dict[str, Any]]:
    def changed(folder: Path) -> dict[str, Any]:
        block = copy.deepcopy(block_of(folder)["slidesparse"])
        change(block["layers"])
        return {"slidesparse": block}

    return changed


WRONG_K = metadata(lambda layers: layers[DOWN].update(in_features=QWEN.intermediate + 1))
OTHER_K = metadata(lambda layers: layers["model.layers.0.self_attn.k_proj"].update(pattern="4:6"))


Change = Callable[[Tensor], Tensor] | None
K_WEIGHT, K_BIAS = f"{K_PROJ}.weight", f"{K_PROJ}.bias"
D_WEIGHT, D_SCALE = f"{DOWN}.weight", f"{DOWN}.weight_scale"
PACKED = "the checkpoint holds a packed weight"
BLOCKS = full((5, slice(16, 24)), (9, slice(312, 320)))

# A checkpoint, a change of a tensor -> what is said of the layer
OF_TENSORS: list[tuple[str, str, Change, str]] = [
    ("dense", K_WEIGHT, None, "the checkpoint lacks its weight"),
    ("dense", D_SCALE, None, "the checkpoint lacks its weight_scale"),
    ("dense", D_SCALE, nan, "weight_scale holds NaN"),
    ("dense", D_SCALE, holed(slice(31)), "the checkpoint's weight_scale of shape [31, 1] does not fit"),
    ("dense", K_WEIGHT, Tensor.bfloat16, "the checkpoint holds torch.bfloat16 weights"),
    ("dense", K_WEIGHT, holed(slice(31)), "the checkpoint's weight of shape [31, 128]"),
    ("slided", K_WEIGHT, holed(slice(31)), "the checkpoint's weight of shape [31, 192]"),
    ("dense", K_BIAS, None, "the checkpoint lacks its bias: 2 of its 3 parts"),
    ("dense", K_BIAS, nan, "bias holds NaN"),
    ("dense", D_WEIGHT, BLOCKS, "row 5, block 2 (columns from 16) has 8 non-zeros, 6:8"),
    ("dense", D_WEIGHT, BLOCKS, "2 blocks of the layer break the pattern"),
    ("slided", D_WEIGHT, full((0, slice(0, 12))), "row 0, block 0 (columns from 0) has 8 non-zeros, 6:8"),
    ("slided", D_WEIGHT, in_two_windows, "row 3 is not the slided form of any weight"),
    ("fp8", D_WEIGHT, coded(0x7F), "weight holds NaN"),
    ("fp8", D_WEIGHT, coded(0xFF), "weight holds NaN"),
    ("packed", f"{DOWN}.shape", lambda t: t + 1, f"{PACKED} of the shape [129, 321]"),
    ("packed", f"{DOWN}.shape", lambda t: t[1:], f"{PACKED} of the shape [320] and"),
    ("packed", f"{DOWN}.shape", Tensor.float, f"{PACKED} of the shape [128.0, 320.0]"),
    ("packed", f"{DOWN}.compressed", lambda t: t[:, 1:].contiguous(), "bits set for"),
    ("packed", D_WEIGHT, ones, "the checkpoint holds a weight twice, packed and as it is"),
]

REQUIRE = {"SLIDESPARSE": "require"}
AWQ = {"quant_method": "awq", "slidesparse": None}
PRUNED = "the metadata say that it was pruned, but"
NO_BLOCK = "names slidesparse as its method but lacks the block"
FUSES = "vLLM fuses q_proj, k_proj, v_proj into "

# A checkpoint, a change of its quantization_config -> what is said, perhaps with flags
OF_CONFIGS: list[tuple[Any, ...]] = [
    ("dense", {"ignore": "lm_head"}, "ignore is 'lm_head', it must be a list of texts"),
    ("dense", {"ignore": [None]}, "ignore is [None], it must be a list of texts"),
    ("dense", {"ignore": ["re:("]}, "ignore holds 're:(', which is no regular expression"),
    ("dense", {"ignore": ["lm_head", DOWN]}, f"{DOWN}: {PRUNED}"),
    ("dense", {"ignore": ["lm_head", K_PROJ]}, f"{FUSES}one layer, but quant"),
    ("dense", lambda f: group(f, targets=["re:nothing"]), f"qkv_proj: {PRUNED}"),
    ("dense", lambda f: group(f, targets="Linear"), "targets of 'group_0' is 'Linear', it must be a list"),
    ("dense", {"kv_cache_scheme": "static"}, "kv_cache_scheme is 'static', it must be an object"),
    ("dense", lambda f: group(f, input_activations=None), "vLLM cannot read quantization_config of this"),
    ("dense", {"format": "zipped"}, "qkv_proj: vLLM does not support the quantization that"),
    ("slided", {"slidesparse": None}, NO_BLOCK),
    ("slided", {"slidesparse": None}, NO_BLOCK, SPARSE_FLAGS),
    ("dense", WRONG_K, f"{DOWN}: the metadata say {QWEN.intermediate + 1} in-features, the model has"),
    ("dense", OTHER_K, f"{FUSES}model.layers.0.self_attn.qkv_proj, but their patterns"),
    ("dense", OTHER_K, "k_proj 4:6, v_proj 6:8; convert again with the same pattern"),
    ("dense", {}, "DISABLE_SLIDESPARSE='on': use 1 or 0", {"DISABLE_SLIDESPARSE": "on"}),
    ("slided", {}, "Unknown quantization method: slidesparse", STOCK),
    ("w8a8", {}, "0 layers sparse, 9 dense (1 lm_head, 8 whose weights break the pattern)", SPARSE_FLAGS),
    ("w8a8", {}, "Convert it: slidesparse convert SRC OUT --sparsity 6:8; or set", SPARSE_FLAGS),
    ("ignored", {}, "0 layers in blocks, each dense or 2:4 by its zeros, 9 dense (1 lm_head, 8 not", REQUIRE),
    ("dense", static_alone, "no group of layers of this checkpoint is W8A8", SPARSE_FLAGS),
    ("fp8", mixed_types, "(8-bit float weights with int activations); the plugin takes", SPARSE_FLAGS),
    ("dense", AWQ, "quantized by 'awq'; the plugin takes compressed-tensors W8A8", SPARSE_FLAGS),
    ("dense", AWQ, "or unset USE_CUSPARSELT", SPARSE_FLAGS),
]

SHARDED = {"load_format": "sharded_state"}
AUTO = {"SLIDESPARSE_BACKEND": "reference"}  # serves unasked here, as hopper on its GPUs

# A checkpoint, an option of vLLM -> what is said, perhaps with flags
OF_OPTIONS: list[tuple[Any, ...]] = [
    ("float", {"quantization": "slidesparse"}, "--quantization slidesparse is for a quantized checkpoint"),
    ("dense", {"quantization": "compressed-tensors"}, "remove one of the two", SPARSE_FLAGS),
    ("dense", SHARDED, "--load-format sharded_state loads a dump"),
    ("w8a8", SHARDED, "vLLM's own kernels serve this model: --load-format sharded_state", AUTO),
]


@pytest.mark.parametrize("case", OF_TENSORS, ids=lambda case: f"{case[0]}-{case[1]}-{case[3]}")
def test_refused_tensors(engines: Engines, checkpoints: Folders, tmp_path: Path, case: Any) -> None:
    base, name, change, words = case
    stored = load_file(checkpoints[base] / "model.safetensors").get(name)
    tensors = {name: None if change is None else change(stored)}
    layer = QKV if name.startswith(K_PROJ) else DOWN
    subject = "" if words.startswith(("2 blocks", "bits set")) else f"{layer}: "
    refused(engines, edited(checkpoints[base], tmp_path / "out", tensors, {}), {}, subject + words)


@pytest.mark.parametrize("case", OF_CONFIGS, ids=lambda case: f"{case[0]}-{case[2]}")
def test_refused_configs_and_flags(engines: Engines, checkpoints: Folders, tmp_path: Path, case: Any) -> None:
    base, config, words, env = (*case, {})[:4]
    folder = checkpoints[base]
    changes = config(folder) if callable(config) else config
    refused(engines, edited(folder, tmp_path / "out", {}, changes) if changes else str(folder), env, words)


@pytest.mark.parametrize("case", OF_OPTIONS, ids=lambda case: case[2])
def test_refused_options(engines: Engines, checkpoints: Folders, case: Any) -> None:
    base, options, words, env = (*case, {})[:4]
    refused(engines, str(checkpoints[base]), env, words, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuSPARSELt can run here")
def test_unusable_backend_is_refused_before_loading(engines: Engines, checkpoints: Folders) -> None:
    """A missing backend of a GPU is an error before weights are read; there is no fallback."""
    answer = engines.ask(Request(str(checkpoints["dense"]), pretend_cuda=True))
    assert "no backend serves the sparse path on cuda" in answer.error + answer.log
    assert "Loading safetensors" not in answer.log


@pytest.mark.parametrize("missing", ["", "weight", "weight_scale", "bias"])
def test_missing_tensors_of_a_one_row_layer_are_named(missing: str) -> None:
    """The bias of a layer with one out-feature has the shape of its scale, [1]."""
    from slidesparse.vllm_patch.loading import LoadCheck

    check, layer = LoadCheck("score", 16, 1), torch.nn.Module()
    for kind, shape in (("weight", (1, 16)), ("weight_scale", (1,)), ("bias", (1,))):
        parameter = torch.nn.Parameter(torch.ones(shape))
        parameter.weight_loader = check.watch(lambda parameter, tensor: None, kind)
        layer.register_parameter(kind, parameter)
        if kind != missing:
            parameter.weight_loader(parameter, torch.ones(shape))
    if missing:
        with pytest.raises(CheckpointError, match=f"score: the checkpoint lacks its {missing}"):
            check.require_all(layer)
    else:
        check.require_all(layer)


def test_slided_weights_are_restored_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large weight needs several times its memory while it is restored; a damaged row keeps its number."""
    from slidesparse.vllm_patch.loading import LoadCheck

    monkeypatch.setattr("slidesparse.slide.CHUNK_ELEMENTS", 60)
    read = []
    monkeypatch.setattr(
        "slidesparse.vllm_patch.loading.restore",
        lambda values, *others: read.append(len(values)) or restore(values, *others),
    )
    six_eight = parse_pattern("6:8")
    dense = prune(torch.arange(1, 161).view(10, 16).to(torch.int8), six_eight)
    parameter = torch.nn.Parameter(torch.zeros_like(dense), requires_grad=False)
    check = LoadCheck("q", 16, 1, [six_eight])
    load = check.watch(lambda parameter, tensor: parameter.data.copy_(tensor), "weight")
    slided = slide(dense, six_eight)
    load(parameter, slided)
    assert torch.equal(parameter, dense)
    assert read == [2] * 5
    slided[7, 0] = slided[7, 4] = 1
    with pytest.raises(CheckFailed, match="q: row 7"):
        load(parameter, slided)


# What is served


def test_second_file_of_weights_is_refused(engines: Engines, checkpoints: Folders, tmp_path: Path) -> None:
    """Without an index vLLM loads all files of a folder, the last one counts, and the layers would be of both."""
    folder = Path(shutil.copytree(checkpoints["dense"], tmp_path / "model"))
    shutil.copy(folder / "model.safetensors", folder / "old.safetensors")
    refused(engines, str(folder), {}, "holds a weight twice, in two files; remove")
    with pytest.raises(CheckpointError, match="holds old.safetensors, and no .* beside model.safetensors"):
        open_checkpoint(folder)


def test_flags_without_effect_are_logged(engines: Engines, checkpoints: Folders) -> None:
    """Flags do not stop models that they are not for, and invalid ones nothing that is disabled."""
    environment = {"SPARSITY": "0.5", "SLIDESPARSE_FUSED": "1", "SLIDESPARSE_BACKEND": "cusparselt"}
    assert not engines.serve(checkpoints["float"], env=environment).summary
    unpruned = engines.serve(checkpoints["w8a8"], env=environment)
    assert "SPARSITY, SLIDESPARSE_BACKEND has no effect on this checkpoint" in unpruned.log
    assert "variables that SlideSparse does not read: SLIDESPARSE_FUSED" in unpruned.log
    assert not unpruned.summary
    invalid = {"DISABLE_SLIDESPARSE": "1", "SPARSITY": "lots", "USE_CUSPARSELT": "1", "USE_CUBLASLT": "maybe"}
    assert not engines.serve(checkpoints["dense"], env=invalid).summary
    assert not engines.serve(checkpoints["dense"], options={"quantization": "compressed-tensors"}).summary


def test_unasked_models_are_never_refused(engines: Engines, checkpoints: Folders, tmp_path: Path) -> None:
    """Whatever stock vLLM serves; tensors that only we refuse, in FP8 codes and in a scale, are left to it."""
    model = write_w8a8(QWEN, tmp_path / "fp8", "fp8")
    weight, scale = (tensors_of(model)[f"{DOWN}.{kind}"] for kind in ("weight", "weight_scale"))
    weight.view(torch.uint8)[0] = 0x7F
    tensors: dict[str, Any] = {f"{DOWN}.weight": weight, f"{K_PROJ}.weight_scale": nan(scale[:64])}
    model = Path(edited(model, tmp_path / "nan", tensors, {}))
    answer = engines.as_stock(model, AUTO)
    assert answer.log.count(f"vLLM's own kernels serve this model: {DOWN}: weight holds") == 1
    assert "7 layers in blocks" in answer.summary
    refused(engines, str(model), REQUIRE, "holds NaN")


def test_draft_model_is_resolved_in_the_front_end(engines: Engines, checkpoints: Folders) -> None:
    draft = {"model": str(checkpoints["dense"]), "num_speculative_tokens": 2, "method": "draft_model"}
    answer = engines.serve(  # without generation: not every CPU build has the kernels that drafts need
        checkpoints["dense"],
        env={"USE_CUBLASLT": "1"},
        task="strip_env",
        options={"speculative_config": draft},
        work={"prompts": []},
    )
    assert [served["path"] for served in summaries(answer.log)] == ["dense", "dense"]


def test_layers_that_a_draft_model_ignores_are_not_quantized(
    engines: Engines, checkpoints: Folders, tmp_path: Path
) -> None:
    """vLLM puts a prefix before their names.  A draft may ignore all of them, though a flag asks for the plugin."""
    partly = write_w8a8(QWEN, tmp_path / "draft", floats=(DOWN,))
    for draft, layers in ((partly, [8, 7]), (checkpoints["ignored"], [8])):
        speculation = {"model": str(draft), "num_speculative_tokens": 2, "method": "draft_model"}
        options, work = {"speculative_config": speculation}, {"prompts": []}
        answer = engines.serve(checkpoints["w8a8"], env=REQUIRE, options=options, work=work)
        assert [served["layers"] for served in summaries(answer.log)] == [{"dense": n} for n in layers]


def test_unsupported_schemes_are_left_to_vllm(engines: Engines, checkpoints: Folders, tmp_path: Path) -> None:
    """Beside sparse layers; static ones have a zero point, which is INT8 like a weight."""
    pruned = checkpoints["dense"]
    parts = block_of(pruned)["config_groups"]["group_0"]
    weights, activations = parts["weights"], parts["input_activations"]
    static = {**activations, "strategy": "tensor", "dynamic": False, "symmetric": False}
    asymmetric = {**activations, "symmetric": False}
    groups = {
        "static": {"targets": ["re:.*0.mlp.down_proj"], "weights": weights, "input_activations": static},
        "asymmetric": {
            "targets": ["re:.*1.mlp.down_proj"],
            "weights": weights,
            "input_activations": asymmetric,
        },
        "group_0": {**parts, "targets": ["re:.*(qkv|o|gate_up|q|k|v|gate|up)_proj"]},
    }
    generator = torch.Generator().manual_seed(1)
    o_proj, shape = "model.layers.0.self_attn.o_proj", (QWEN.hidden, QWEN.heads * QWEN.head_dim)
    tensors = {
        f"{DOWN}.input_scale": torch.tensor([0.05]),
        f"{DOWN}.input_zero_point": torch.tensor([3], dtype=torch.int8),
        f"{o_proj}.weight_scale": None,
        f"{o_proj}.weight": torch.randn(shape, generator=generator) * 0.05,
        "model.layers.1.self_attn.o_proj.weight": torch.randint(-60, 61, shape, generator=generator).char(),
    }
    config = {"config_groups": groups, "ignore": ["lm_head", o_proj], "slidesparse": None}
    model = edited(pruned, tmp_path / "mixed", tensors, config)
    sparse = engines.as_stock(model, SPARSE_FLAGS)
    assert sparse.summary.startswith(
        "6:8 (2 of every 8 pruned): 4 layers sparse, 5 dense (1 asymmetric activations, 1 lm_head, 1 not quantized, "
        "1 static activations, 1 whose weights break the pattern)"
    ), sparse.summary


def test_stamp_in_the_checkpoint_is_ignored(engines: Engines, checkpoints: Folders, tmp_path: Path) -> None:
    """The plugin itself writes the stamp into the config, in memory."""
    expected = engines.serve(checkpoints["dense"])
    stamp = {"path": "dense", "backend": "hopper", "pattern": "4:6", "profile": True}
    planted = edited(checkpoints["dense"], tmp_path / "planted", {}, {"slidesparse_serving": stamp})
    answer = engines.serve(planted)
    assert (answer.summary, answer.tokens) == (expected.summary, expected.tokens)


def test_kv_scales_per_head_are_read(engines: Engines, checkpoints: Folders, tmp_path: Path) -> None:
    """vLLM adds the entries that KV scales per head need only if the method is named compressed-tensors."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    model = edited(checkpoints["slided"], tmp_path / "out", {}, {"kv_cache_scheme": scheme})
    answer = engines.ask(Request(model))
    assert "AssertionError" not in answer.error, answer.log[-3000:]
