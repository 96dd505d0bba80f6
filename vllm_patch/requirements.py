"""What the product needs of vLLM's source, a table for each part.  Standard library only; nothing runs while serving.

The plugin's lies here, beside the code that it describes, so that who changes a call into vLLM has the line to change
before his eyes; with it those of the two programs that run inside vLLM, of the end-to-end benchmark and of evaluation.
``tools/vllm_compat.py`` checks releases against them, reading their source without importing it, and
tests/test_vllm_compat.py checks both the installed vLLM and that the tables list what the code uses.

A target is written ``package.module:Class.method``; signatures and calls as in Python, without ``self`` or ``cls``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defined:
    """The name exists, defined there or imported from elsewhere in vLLM."""

    target: str


@dataclass(frozen=True)
class Constant:
    """The name is assigned this literal."""

    target: str
    value: object


@dataclass(frozen=True)
class Call:
    """We call it like this; of a class, its constructor, by keywords."""

    target: str
    call: str  # "(layer, prefix=prefix)"


@dataclass(frozen=True)
class Override:
    """Our subclass overrides the method with this signature, so whatever vLLM's takes, ours must take."""

    target: str
    ours: str  # "(layer, layer_name=None)"


@dataclass(frozen=True)
class CallSite:
    """vLLM calls ``callee``, a method of ours, somewhere in ``target``: the arguments fit and hold ``passes``."""

    target: str  # a module, or a function in it
    callee: str
    ours: str
    passes: tuple[str, ...] = ()  # keywords that we read


@dataclass(frozen=True)
class Abstract:
    """The class asks its subclasses for no method but these, which ours has."""

    target: str
    implemented: tuple[str, ...]


@dataclass(frozen=True)
class Attributes:
    """Instances of the class have these attributes: fields, properties, or assigned to ``self``."""

    target: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Sets:
    """The method sets these attributes of its argument ``layer``, or registers parameters of these names."""

    target: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Parameters:
    """The function takes these parameters in this order, and no others: we read calls of it by position."""

    target: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class IfThere:
    """What a release that has the target, a module or a name in one, must have of it."""

    target: str
    requirement: Parameters


@dataclass(frozen=True)
class OneOf:
    """At least one of them holds: what vLLM renamed and we know by both names."""

    options: tuple[Requirement, ...]


Requirement = Defined | Constant | Call | Override | CallSite | Abstract | Attributes | Sets
Requirement |= Parameters | IfThere | OneOf

_LAYERS = "vllm.model_executor.layers"
_MODULE = f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors"
_CONFIG = f"{_MODULE}:CompressedTensorsConfig"
_METHOD = f"{_MODULE}:CompressedTensorsLinearMethod"
_SCHEMES = f"{_LAYERS}.quantization.compressed_tensors.schemes"
_SCHEME = f"{_SCHEMES}:CompressedTensorsScheme"
_INT8, _FP8 = f"{_SCHEMES}:CompressedTensorsW8A8Int8", f"{_SCHEMES}:CompressedTensorsW8A8Fp8"

# Our signatures; a test holds them against the code.
CONFIG_METHODS = {
    "override_quantization_method": "(hf_quant_cfg, user_quant, hf_config=None)",
    "from_config": "(config)",
    "apply_vllm_mapper": "(hf_to_vllm_mapper)",
    "get_quant_method": "(layer, prefix)",
    "get_scheme": "(layer, layer_name=None)",
}
SCHEME_METHODS = {
    "get_min_capability": "()",
    "create_weights": "(layer, **kwargs)",
    "process_weights_after_loading": "(layer)",
    "apply_weights": "(layer, x, bias=None)",
}

PLUGIN: tuple[Requirement, ...] = (
    # __init__.py: how vLLM finds and loads us
    Constant("vllm.plugins:DEFAULT_PLUGINS_GROUP", "vllm.general_plugins"),
    Defined("vllm.plugins:load_general_plugins"),
    Defined("vllm.envs:VLLM_PLUGINS"),
    # config.py: the registered config
    Call("vllm.logger:init_logger", "(name)"),
    Call(f"{_LAYERS}.quantization:register_quantization_config", "(name)"),
    Call("vllm.platforms.interface:Platform.is_cuda", "()"),
    Call("vllm.platforms.interface:Platform.is_cpu", "()"),
    Call("vllm.platforms.interface:Platform.get_device_capability", "()"),
    Attributes("vllm.platforms.interface:Platform", ("device_type", "device_name")),
    Defined("vllm.platforms:current_platform"),
    Defined(f"{_LAYERS}.linear:LinearBase"),
    *(Override(f"{_CONFIG}.{name}", ours) for name, ours in CONFIG_METHODS.items()),
    Call(f"{_CONFIG}.from_config", "(config)"),
    Call(f"{_CONFIG}.apply_vllm_mapper", "(hf_to_vllm_mapper)"),
    Call(f"{_CONFIG}.get_quant_method", "(layer, prefix)"),
    Call(f"{_CONFIG}.get_scheme", "(layer, layer_name)"),
    Call(f"{_CONFIG}.get_scheme_dict", "(layer, layer_name)"),
    Call("vllm.model_executor.models.utils:WeightsMapper._map_name", "(name)"),
    Attributes(_CONFIG, ("packed_modules_mapping",)),
    CallSite(
        "vllm.config.model",
        "override_quantization_method",
        CONFIG_METHODS["override_quantization_method"],
    ),
    CallSite(_MODULE, "get_scheme", CONFIG_METHODS["get_scheme"]),
    OneOf(  # linear layers asked the config themselves until a function of base_config.py did so for them (0.30)
        tuple(
            CallSite(f"{_LAYERS}.{module}", "get_quant_method", CONFIG_METHODS["get_quant_method"])
            for module in ("linear", "quantization.base_config")
        )
    ),
    # scheme.py: the scheme of one layer, which wraps vLLM's
    Abstract(_SCHEME, tuple(SCHEME_METHODS)),
    *(Override(f"{_SCHEME}.{name}", ours) for name, ours in SCHEME_METHODS.items()),
    CallSite(
        f"{_METHOD}.create_weights",
        "create_weights",
        SCHEME_METHODS["create_weights"],
        passes=("layer", "input_size", "input_size_per_partition", "params_dtype", "weight_loader"),
    ),
    CallSite(
        f"{_METHOD}.process_weights_after_loading",
        "process_weights_after_loading",
        SCHEME_METHODS["process_weights_after_loading"],
    ),
    CallSite(f"{_METHOD}.apply", "apply_weights", SCHEME_METHODS["apply_weights"]),
    *(
        requirement
        for scheme in (_INT8, _FP8)
        for requirement in (
            Sets(f"{scheme}.create_weights", ("weight", "weight_scale", "logical_widths")),
            Call(f"{scheme}.process_weights_after_loading", "(layer)"),
            Call(f"{scheme}.apply_weights", "(layer, x, bias)"),
        )
    ),
    Attributes(_INT8, ("is_static_input_scheme", "input_symmetric")),
    Attributes(_FP8, ("is_static_input_scheme", "strategy")),
    Attributes(f"{_LAYERS}.linear:LinearBase", ("tp_rank",)),
    Call(
        "vllm.model_executor.parameter:ModelWeightParameter",
        "(data=data, input_dim=1, output_dim=0, weight_loader=weight_loader)",
    ),
    # compat.py
    Call("vllm.config:get_current_vllm_config", "()"),
    Attributes(
        "vllm.config:VllmConfig",
        ("load_config", "compilation_config", "parallel_config", "additional_config", "model_config"),
    ),
    Attributes("vllm.config.model:ModelConfig", ("dtype",)),
    Attributes("vllm.config.parallel:ParallelConfig", ("enable_dbo", "pipeline_parallel_size")),
    Attributes("vllm.config.load:LoadConfig", ("load_format",)),
    Attributes("vllm.config.compilation:CompilationConfig", ("backend", "inductor_compile_config", "mode")),
    OneOf(
        (
            Defined(f"{_LAYERS}.fused_moe.layer:FusedMoE"),
            Defined(f"{_LAYERS}.fused_moe.routed_experts:RoutedExperts"),
        )
    ),
)

_NORMS = "vllm.ir.ops.layernorm"  # operators of whole norms, which releases before it write out

FUSION: tuple[Requirement, ...] = (  # fusion.py: the pass, and the graphs that it looks through
    OneOf(
        (
            Defined("vllm.compilation.passes.inductor_pass:InductorPass"),
            Defined("vllm.compilation.inductor_pass:InductorPass"),
        )
    ),
    IfThere("vllm.ir.ops", Parameters(f"{_NORMS}:rms_norm", ("x", "weight", "epsilon", "variance_size"))),
    IfThere(  # younger than the other
        f"{_NORMS}:fused_add_rms_norm",
        Parameters(f"{_NORMS}:fused_add_rms_norm", ("x", "x_residual", "weight", "epsilon", "variance_size")),
    ),
)

_ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"
_THROUGHPUT = "vllm.benchmarks.throughput"
_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_PARSER = "vllm.utils.argparse_utils:FlexibleArgumentParser"

BENCHMARK: tuple[Requirement, ...] = (  # slidesparse/bench/e2e_worker.py
    Attributes(_SCHEDULER, ("max_num_scheduled_tokens",)),
    Defined(f"{_SCHEDULER}.schedule"),  # overridden with whatever arguments it takes
    Call(_PARSER, "()"),
    Call(f"{_PARSER}.parse_args", "(words)"),
    Call(f"{_THROUGHPUT}:add_cli_args", "(parser)"),
    Call(f"{_THROUGHPUT}:main", "(arguments)"),
    CallSite(_THROUGHPUT, "from_engine_args", "(*args, **kwargs)"),  # where it is handed our engine
    Call(f"{_ENGINE_ARGS}.from_cli_args", "(arguments)"),
    Attributes(_ENGINE_ARGS, ("scheduler_cls",)),
    Call("vllm:LLM.from_engine_args", "(arguments)"),
)

EVALUATION: tuple[Requirement, ...] = (  # slidesparse/evaluate/worker.py
    Call("vllm:LLM", "(model=model, runner=runner, skip_tokenizer_init=True, enforce_eager=True)"),
    Attributes(_ENGINE_ARGS, ("max_logprobs", "max_model_len")),  # which LLM takes as well
    Call("vllm:LLM.generate", "(prompts, wanted, use_tqdm=False)"),
    Call("vllm:LLM.embed", "(prompts, use_tqdm=False)"),
    Attributes("vllm:SamplingParams", ("max_tokens", "temperature", "prompt_logprobs", "detokenize")),
    Attributes("vllm.outputs:RequestOutput", ("prompt_logprobs",)),
    Attributes("vllm.logprobs:Logprob", ("logprob", "rank")),
    Attributes("vllm.outputs:PoolingRequestOutput", ("outputs",)),
    Attributes("vllm.outputs:EmbeddingOutput", ("embedding",)),
)

# Part of the product -> what it needs.  Parts do not need each other: a name that only the benchmark uses, and that a
# release lacks, leaves the plugin whole.
REQUIREMENTS = {"plugin": PLUGIN, "fusion": FUSION, "benchmark": BENCHMARK, "evaluation": EVALUATION}
