"""The rules of vLLM that `convert` writes by: which KV caches and tensors it takes."""

from __future__ import annotations

from typing import Any

import pytest

from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.serving import kv_cache_scheme, surplus

FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
SCHEMES: list[tuple[Any, Any]] = [  # of a source, of the output; CheckpointError where it is refused
    (None, None),
    ("static", FLOAT8),
    (FLOAT8, FLOAT8),
    ({**FLOAT8, "strategy": "attn_head"}, {**FLOAT8, "strategy": "attn_head"}),
    ({**FLOAT8, "num_bits": 4}, CheckpointError),
    ({**FLOAT8, "type": "int"}, CheckpointError),
    ({**FLOAT8, "strategy": "channel"}, CheckpointError),
    ({**FLOAT8, "symmetric": False}, CheckpointError),
    ("fp8", CheckpointError),
    ([1], CheckpointError),
]


@pytest.mark.parametrize(("source", "output"), SCHEMES)
def test_kv_cache_schemes_are_translated_or_refused(source: Any, output: Any) -> None:
    if output is CheckpointError:
        with pytest.raises(
            CheckpointError, match="is not served by vLLM, which takes symmetric 8-bit floats"
        ):
            kv_cache_scheme(source)
    else:
        assert kv_cache_scheme(source) == output


@pytest.mark.vllm
@pytest.mark.parametrize(("source", "output"), [row for row in SCHEMES if isinstance(row[0], dict)])
def test_vllm_takes_the_same_kv_cache_schemes(source: dict[str, Any], output: Any) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    validate = compressed_tensors.CompressedTensorsKVCacheMethod.validate_kv_cache_scheme
    if output is CheckpointError:
        with pytest.raises(NotImplementedError):
            validate(source)
    else:
        validate(source)


def test_tensors_that_quantizers_leave_behind_are_known() -> None:
    layer = "model.layers.0.self_attn.k_proj"
    kept = [f"{layer}.{kind}" for kind in ("weight", "weight_scale", "bias", "k_scale")]
    kept += [
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.k_proj2.weight_g_idx",
        "lm_head.weight",
    ]
    kinds = (
        "weight_g_idx",
        "weight_zero_point",
        "input_scale",
        "input_global_scale",
        "weight_observer.min_vals",
    )
    left = [f"{layer}.{kind}" for kind in kinds]
    assert surplus([*kept, *left], {layer}) == left
