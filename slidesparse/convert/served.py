"""Ask vLLM, where it is installed, how it would serve the output of a conversion, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator

from slidesparse.checkpoint.metadata import COMPRESSED_TENSORS, KEY
from slidesparse.checkpoint.names import SCALE, WEIGHT, is_expert, serving_options
from slidesparse.checkpoint.storage import CheckpointError, TensorSpec
from slidesparse.convert.plan import ConversionPlan, Planner, Served
from slidesparse.serving import NotServedError, Skeletons


def ask(planner: Planner, skeletons: Skeletons) -> str:
    """Let ``planner`` plan what vLLM serves: `Planner.served` is set.

    Layers that vLLM builds without quantization, as some mixers of Mamba, stay unchanged, and those that it calls by a
    name of its own are ignored by that name.  Returns "", or why vLLM does not serve such a model on this machine.
    Raises CheckpointError where it would serve the source, but not the output.
    """
    plan = planner.plan()
    if plan.source.metadata:
        return _check(plan, skeletons)
    block = {key: value for key, value in plan.config["quantization_config"].items() if key != KEY}
    block["quant_method"] = COMPRESSED_TENSORS
    config = {**plan.config, "quantization_config": block}
    try:
        serving = skeletons.layers(plan.checkpoint.folder, _unpacked(plan), config, **serving_options(config))
    except NotServedError as error:
        return str(error)
    names: dict[str, list[str]] = {}
    quantized = set()
    for layer in serving.layers:
        quantized |= {*layer.weights} if layer.quantized else set()
        for weight in layer.weights:
            names.setdefault(weight, []).append(layer.name)
    planned = {output.layer for output in plan.outputs if output.layer} & {*planner.skeleton.layers}
    if not planned & quantized:
        return "it quantizes none of its linear layers"
    planner.served = Served(frozenset(planned - quantized), names)
    return _check(planner.plan(), skeletons)


def _unpacked(plan: ConversionPlan) -> Iterator[TensorSpec]:
    """Yield the tensors of a plan, [N, K] and without the scales that unquantized layers cannot load."""
    for output in plan.outputs:
        for spec in output.specs:
            if output.layer and spec.name == output.layer + WEIGHT:
                columns = plan.source.in_features(output.layer)
                yield spec._replace(shape=(spec.shape[0], columns))
            elif not spec.name.endswith(SCALE):
                yield spec


def _check(plan: ConversionPlan, skeletons: Skeletons) -> str:
    """Return "" if vLLM would serve what a plan writes.  Raises CheckpointError if not."""
    specs = [spec for output in plan.outputs for spec in output.specs]
    try:
        serving = skeletons.layers(plan.checkpoint.folder, specs, plan.config, **serving_options(plan.config))
    except NotServedError as error:
        raise CheckpointError(
            f"vLLM, which is installed here, would not serve the converted checkpoint: {error}"
        ) from None
    quantized = {name for layer in serving.layers if layer.quantized for name in layer.weights}
    if lost := [name for name in plan.patterns if name not in quantized and not is_expert(name)]:
        raise CheckpointError(
            f"vLLM, which is installed here, would not serve {lost[0]} quantized; leave such layers unchanged by "
            "--ignore"
        )
    return ""
