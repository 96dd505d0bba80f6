"""The smallest source tree that has all that we need of vLLM, and what a release might change of it."""

from __future__ import annotations

COMPRESSED = "vllm/model_executor/layers/quantization/compressed_tensors"

SMALLEST = {
    "vllm/plugins/__init__.py": """
DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"
def load_general_plugins(): ...
""",
    "vllm/envs.py": "if TYPE_CHECKING:\n    VLLM_PLUGINS: list[str] | None = None\n",
    "vllm/logger.py": "def init_logger(name: str): ...\n",
    "vllm/platforms/__init__.py": "current_platform: Platform\n",
    "vllm/platforms/interface.py": """
class Platform:
    device_type: str
    device_name: str
    def is_cuda(self): ...
    def is_cpu(self): ...
    def get_device_capability(self, device_id=0): ...
""",
    "vllm/config/__init__.py": """
from vllm.config.load import LoadConfig
from vllm.config.vllm import VllmConfig, get_current_vllm_config
""",
    "vllm/config/vllm.py": """
class VllmConfig:
    load_config: LoadConfig = Field()
    compilation_config: CompilationConfig = Field()
    parallel_config: ParallelConfig = Field()
    additional_config: dict = Field()
    model_config: ModelConfig = Field()
def get_current_vllm_config(): ...
""",
    "vllm/config/load.py": "class LoadConfig:\n    load_format: str = 'auto'\n",
    "vllm/config/parallel.py": """
class ParallelConfig:
    enable_dbo: bool = False
    pipeline_parallel_size: int = 1
""",
    "vllm/config/compilation.py": """
class CompilationConfig:
    mode: int = 3
    backend: str = ""
    inductor_compile_config: dict = field(default_factory=dict)
""",
    "vllm/compilation/inductor_pass.py": "class InductorPass(CustomGraphPass): ...\n",
    "vllm/ir/ops/__init__.py": "from .layernorm import fused_add_rms_norm, rms_norm\n",
    "vllm/ir/ops/layernorm.py": """
@register_op
def rms_norm(x, weight, epsilon: float, variance_size=None): ...
@register_op(allow_inplace=True)
def fused_add_rms_norm(x, x_residual, weight, epsilon: float, variance_size=None): ...
""",
    "vllm/config/model.py": """
class ModelConfig:
    dtype: str = "auto"
def verify(self, method):
    method.override_quantization_method(quant_cfg, self.quantization, hf_config=self.hf_config)
""",
    "vllm/model_executor/models/utils.py": "class WeightsMapper:\n    def _map_name(self, key): ...\n",
    "vllm/model_executor/parameter.py": """
class Base(Parameter):
    def __init__(self, data, weight_loader): ...
class Column(Base):
    def __init__(self, output_dim, **kwargs): ...
class Row(Base):
    def __init__(self, input_dim, **kwargs): ...
class ModelWeightParameter(Column, Row): ...
""",
    "vllm/model_executor/layers/linear.py": """
class LinearBase:
    def __init__(self):
        self.tp_rank = 0
        self.quant_method = quant_config.get_quant_method(self, prefix=prefix)
""",
    "vllm/model_executor/layers/fused_moe/layer.py": "class FusedMoE: ...\n",
    "vllm/model_executor/layers/quantization/__init__.py": "def register_quantization_config(quantization): ...\n",
    "vllm/model_executor/layers/quantization/base_config.py": """
class QuantizationConfig(ABC):
    def __init__(self):
        self.packed_modules_mapping = dict()
    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None): ...
""",
    f"{COMPRESSED}/compressed_tensors.py": """
from ..base_config import QuantizationConfig
class CompressedTensorsConfig(QuantizationConfig):
    @classmethod
    def from_config(cls, config): ...
    def apply_vllm_mapper(self, hf_to_vllm_mapper): ...
    def get_quant_method(self, layer, prefix):
        return self.get_scheme(layer=layer, layer_name=prefix)
    def get_scheme(self, layer, layer_name=None): ...
    def get_scheme_dict(self, layer, layer_name=None): ...
class CompressedTensorsLinearMethod:
    def create_weights(self, layer, input_size_per_partition, input_size, **extra):
        layer.scheme.create_weights(
            layer=layer, input_size=input_size, input_size_per_partition=1, params_dtype=extra["dtype"],
            weight_loader=extra["weight_loader"],
        )
    def process_weights_after_loading(self, layer):
        layer.scheme.process_weights_after_loading(layer)
    def apply(self, layer, x, bias=None):
        return layer.scheme.apply_weights(layer, x, bias=bias)
""",
    f"{COMPRESSED}/schemes/__init__.py": """
from .scheme import CompressedTensorsScheme
from .w8a8 import CompressedTensorsW8A8Fp8, CompressedTensorsW8A8Int8
""",
    f"{COMPRESSED}/schemes/scheme.py": """
class CompressedTensorsScheme(ABC):
    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...
    @abstractmethod
    def create_weights(self, *args, **kwargs): ...
    @abstractmethod
    def apply_weights(self, layer, x, bias): ...
    @abstractmethod
    def process_weights_after_loading(self, layer): ...
""",
    f"{COMPRESSED}/schemes/w8a8.py": """
class CompressedTensorsW8A8Int8(CompressedTensorsScheme):
    def __init__(self, strategy, is_static_input_scheme, input_symmetric):
        self.strategy = strategy
        self.is_static_input_scheme = is_static_input_scheme
        self.input_symmetric = input_symmetric
    def create_weights(self, layer, **kwargs):
        layer.logical_widths = []
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale", scale)
    def process_weights_after_loading(self, layer): ...
    def apply_weights(self, layer, x, bias): ...
class CompressedTensorsW8A8Fp8(CompressedTensorsW8A8Int8): ...
""",
    "vllm/__init__.py": """
if typing.TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.sampling_params import SamplingParams
""",
    "vllm/entrypoints/llm.py": """
class LLM(Mixin):
    def __init__(self, model, *, runner="auto", skip_tokenizer_init=False, enforce_eager=False, **kwargs): ...
    @classmethod
    def from_engine_args(cls, engine_args): ...
    def generate(self, prompts, sampling_params=None, *, use_tqdm=True): ...
    def embed(self, prompts, *, use_tqdm=True): ...
""",
    "vllm/sampling_params.py": """
class SamplingParams(Struct, omit_defaults=True):
    max_tokens: int = 16
    temperature: float = 1.0
    prompt_logprobs: int = None
    detokenize: bool = True
""",
    "vllm/logprobs.py": "class Logprob:\n    logprob: float\n    rank: int = None\n",
    "vllm/outputs.py": """
class RequestOutput:
    def __init__(self, prompt_logprobs):
        self.prompt_logprobs = prompt_logprobs
class PoolingRequestOutput(Generic[T]):
    def __init__(self, outputs):
        self.outputs = outputs
class EmbeddingOutput:
    embedding: list[float]
""",
    "vllm/engine/arg_utils.py": """
class EngineArgs:
    max_logprobs: int = 20
    max_model_len: int = None
    scheduler_cls: str = None
    @classmethod
    def from_cli_args(cls, args): ...
""",
    "vllm/utils/argparse_utils.py": """
class FlexibleArgumentParser(ArgumentParser):
    def __init__(self, *args, **kwargs): ...
    def parse_args(self, args=None, namespace=None): ...
""",
    "vllm/benchmarks/throughput.py": """
def run_vllm(engine_args):
    llm = LLM.from_engine_args(engine_args)
def add_cli_args(parser): ...
def main(args): ...
""",
    "vllm/v1/core/sched/async_scheduler.py": """
from vllm.v1.core.sched.scheduler import Scheduler
class AsyncScheduler(Scheduler): ...
""",
    "vllm/v1/core/sched/scheduler.py": """
class Scheduler:
    def __init__(self):
        self.max_num_scheduled_tokens = 8192
    def schedule(self, throttle_prefills=False): ...
""",
}

CHANGES = {  # what vLLM might do: (file, words, what they become, what the checker says)
    "a module moves": (
        "vllm/model_executor/parameter.py",
        None,
        "",
        "no module vllm.model_executor.parameter",
    ),
    "a class goes": (
        f"{COMPRESSED}/schemes/__init__.py",
        "CompressedTensorsW8A8Int8",
        "CompressedTensorsInt8",
        f"no CompressedTensorsW8A8Int8 in {COMPRESSED.replace('/', '.')}.schemes",
    ),
    "a method goes": (
        f"{COMPRESSED}/compressed_tensors.py",
        "def apply_vllm_mapper",
        "def apply_mapper",
        "no apply_vllm_mapper in CompressedTensorsConfig",
    ),
    "a parameter is renamed": (
        f"{COMPRESSED}/compressed_tensors.py",
        "get_scheme(self, layer, layer_name=None)",
        "get_scheme(self, layer, prefix=None)",
        "CompressedTensorsConfig.get_scheme takes (layer, prefix=None), ours takes (layer, layer_name=None)",
    ),
    "an inherited method takes more": (
        "vllm/model_executor/layers/quantization/base_config.py",
        "hf_config=None",
        "hf_config=None, revision=None",
        "override_quantization_method takes (hf_quant_cfg, user_quant, hf_config=None, revision=None)",
    ),
    "what we call needs more": (
        "vllm/model_executor/layers/quantization/__init__.py",
        "(quantization)",
        "(quantization, kind)",
        "takes (quantization, kind), we pass (name): missing a required argument: 'kind'",
    ),
    "a constructor's keyword is renamed": (
        "vllm/model_executor/parameter.py",
        "input_dim",
        "in_dim",
        "ModelWeightParameter takes (*, output_dim, data, weight_loader, in_dim)",
    ),
    "a new abstract method": (
        f"{COMPRESSED}/schemes/scheme.py",
        "(self, layer): ...\n",
        "(self, layer): ...\n    @abstractmethod\n    def dequantize(self, layer): ...\n",
        "CompressedTensorsScheme has a new abstract method, dequantize",
    ),
    "vLLM passes something new": (
        "vllm/config/model.py",
        "hf_config=self.hf_config",
        "model=self",
        "ours takes (hf_quant_cfg, user_quant, hf_config=None): got an unexpected keyword argument 'model'",
    ),
    "vLLM passes less": (
        f"{COMPRESSED}/compressed_tensors.py",
        "input_size=input_size, ",
        "",
        "calls create_weights without input_size",
    ),
    "vLLM calls it no longer": (
        f"{COMPRESSED}/compressed_tensors.py",
        "return layer.scheme.apply_weights(",
        "return layer.scheme.apply(",
        "CompressedTensorsLinearMethod.apply does not call apply_weights",
    ),
    "an attribute is renamed": (
        f"{COMPRESSED}/schemes/w8a8.py",
        "self.input_symmetric",
        "self.symmetric",
        "CompressedTensorsW8A8Int8 has no attribute input_symmetric",
    ),
    "a field goes": (
        "vllm/config/load.py",
        "load_format",
        "format",
        "LoadConfig has no attribute load_format",
    ),
    "a parameter of the layer is renamed": (
        f"{COMPRESSED}/schemes/w8a8.py",
        '"weight_scale"',
        '"scale"',
        "CompressedTensorsW8A8Int8.create_weights sets no layer.weight_scale",
    ),
    "the entry point's group": (
        "vllm/plugins/__init__.py",
        '"vllm.general_plugins"',
        '"vllm.plugins"',
        "DEFAULT_PLUGINS_GROUP is DEFAULT_PLUGINS_GROUP = 'vllm.plugins', not 'vllm.general_plugins'",
    ),
    "both names go": (
        "vllm/model_executor/layers/fused_moe/layer.py",
        "FusedMoE",
        "Experts",
        "no FusedMoE in vllm.model_executor.layers.fused_moe.layer and no module",
    ),
}

NORMS = "vllm/ir/ops/layernorm.py"
WITHOUT_NORMS = ("vllm/ir/ops/__init__.py", NORMS)  # which releases may lack

OTHER_CHANGES = {  # of names that the plugin does not use: (file, words, what they become, the part that breaks, says)
    "the benchmark's scheduler moves": (
        "vllm/v1/core/sched/async_scheduler.py",
        None,
        "",
        "benchmark",
        "no module vllm.v1.core.sched.async_scheduler",
    ),
    "the scheduler's limit is renamed": (
        "vllm/v1/core/sched/scheduler.py",
        "max_num_scheduled_tokens",
        "token_budget",
        "benchmark",
        "AsyncScheduler has no attribute max_num_scheduled_tokens",
    ),
    "the benchmark makes its engine otherwise": (
        "vllm/benchmarks/throughput.py",
        "LLM.from_engine_args(engine_args)",
        "LLM(**engine_args)",
        "benchmark",
        "vllm.benchmarks.throughput does not call from_engine_args",
    ),
    "a field of parameters is renamed": (
        "vllm/sampling_params.py",
        "detokenize",
        "to_text",
        "evaluation",
        "SamplingParams has no attribute detokenize",
    ),
    "passes are no longer taken": (
        "vllm/compilation/inductor_pass.py",
        None,
        "",
        "fusion",
        "no module vllm.compilation.passes.inductor_pass and no module vllm.compilation.inductor_pass",
    ),
    "a norm takes its arguments in another order": (
        NORMS,
        "x, weight, epsilon: float",
        "x, epsilon: float, weight",
        "fusion",
        "rms_norm takes (x, epsilon, weight, variance_size=None), we read calls of it as (x, weight, epsilon, varia",
    ),
    "a norm is renamed": (
        NORMS,
        "def rms_norm",
        "def norm",
        "fusion",
        "no rms_norm in vllm.ir.ops.layernorm",
    ),
    "norms move": (NORMS, None, "", "fusion", "no module vllm.ir.ops.layernorm"),
    "a norm takes its arguments by name": (
        NORMS,
        "x, weight, epsilon: float",
        "x, weight, *, epsilon: float",
        "fusion",
        "rms_norm takes (x, weight, *, epsilon, variance_size=None), we read calls",
    ),
    "a norm with a residual takes more": (
        NORMS,
        "weight, epsilon: float, variance_size=None): ...\n",
        "weight, bias, epsilon: float, variance_size=None): ...\n",
        "fusion",
        "fused_add_rms_norm takes (x, x_residual, weight, bias, epsilon, variance_size=None), we read calls",
    ),
    "an option of the engine goes": (
        "vllm/entrypoints/llm.py",
        "skip_tokenizer_init=False",
        "tokenizer=None",
        "evaluation",
        "LLM takes (*, model, runner=None, tokenizer=None, enforce_eager=None), we pass",
    ),
}
