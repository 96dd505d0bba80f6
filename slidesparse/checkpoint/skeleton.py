"""The modules of a checkpoint's model, as transformers makes them, without weights.

What a linear layer is, which block it belongs to and what its tensors are called is asked of transformers: the linear
layers are the `torch.nn.Linear` modules in the list of transformer blocks, and transformers' own conversion mapping
says which tensor of the files becomes which parameter.  Parameters are on the meta device; buffers, such as rotary
frequencies, are real.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slidesparse.checkpoint import storage
from slidesparse.checkpoint.names import BIAS, EXPERT, WEIGHT, architecture_of, joined_experts
from slidesparse.checkpoint.storage import CONFIG, FLOATS, Checkpoint, CheckpointError, TensorSpec
from slidesparse.errors import is_out_of_memory, shown

# transformers' parameters that join the matrices of experts, and vLLM's names of these
JOINED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
TIED = "tie_word_embeddings"  # key of config.json: whether the output head is the embedding
INCOMPLETE = "the checkpoint is incomplete, or the config another model's: fetch it again"
# Keys of such counts, unlike vocab_size_per_layer_input of Gemma 3n
_COUNT = re.compile(r"(?:layers?|depth)\Z")
_FILLS = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)
LARGE = 2**24  # elements
MAX_LAYERS = 1024  # blocks and other counts of modules, which take time to make; 126 in Llama 3.1 405B


class Place(NamedTuple):
    """The place of a matrix, which is stored as a tensor, in a parameter of a block: all of it, or an expert's part.

    Experts are joined, [experts, N, K].  Of the ``parts`` equal parts of the rows of expert ``number``, such as gate
    and up, the matrix is the one of index ``part``.
    """

    parameter: str
    number: int | None = None
    part: int = 0
    parts: int = 1

    def of(self, x: Tensor) -> Tensor:
        """Return the matrix as a view of the parameter."""
        return x if self.number is None else x[self.number].chunk(self.parts)[self.part]


class Skeleton:
    """The model of a checkpoint without weights.

    Raises CheckpointError for a model that transformers does not know, whose config.json it refuses, or that has no
    linear layer of the usual form.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        with _quiet():
            self.config, self.text_config = _read_config(checkpoint)
            # blocks may run one at a time, and again with other states
            self.text_config.output_router_logits = False
            for config in (self.config, self.text_config):
                config.use_cache, config.return_dict, config.chunk_size_feed_forward = False, True, 0
            self.model: Any = _build(checkpoint, self.config)
            self._targets, self._sources = _rename(self.model, checkpoint.tensors)
        self.list_path, self.blocks = self._find_blocks()

    def __reduce__(self) -> tuple[Any, ...]:  # for other processes, which make it anew
        return Skeleton, (self.checkpoint,)

    # Blocks and layers

    def _find_blocks(self) -> tuple[str, list[nn.Module]]:
        """Return the path of the list of transformer blocks, such as ``model.layers``, and its modules."""
        depth = getattr(self.text_config, "num_hidden_layers", None)
        decoder = (self.model.get_decoder() if hasattr(self.model, "get_decoder") else None) or self.model
        inside = {id(module) for module in decoder.modules()}
        lists = [
            (name, module)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == depth
        ]
        lists = [entry for entry in lists if id(entry[1]) in inside] or lists
        if not lists or getattr(self.config, "is_encoder_decoder", False):
            raise CheckpointError(
                f"{type(self.model).__name__} is not a stack of {depth} transformer blocks, as many as config.json's "
                "num_hidden_layers; other forms can neither be converted nor inspected: serve the model as it is"
            )
        name, module = lists[0]
        return name, list(module)

    def prefix(self, number: int) -> str:
        """Return the prefix of the parameter names of a block, such as ``model.layers.0.``."""
        return f"{self.list_path}.{number}."

    def linears(self, number: int) -> list[str]:
        """Return the names within a block of its linear layers that are stored as weights of their own, [N, K]."""
        prefix = self.prefix(number)
        return [name for name in _linears(self.blocks[number]) if prefix + name + WEIGHT in self.stored]

    def layer(self, number: int, name: str) -> str:
        """Return the checkpoint's name of a linear layer of a block, without ``.weight``.

        Raises CheckpointError if it has none.
        """
        parameter = self.prefix(number) + name + WEIGHT
        if parameter not in self.stored:
            raise CheckpointError(f"{parameter} is missing; {INCOMPLETE}")
        return self.stored[parameter].removesuffix(WEIGHT)

    @cached_property
    def layers(self) -> list[str]:
        """The checkpoint's names of the linear layers of all blocks."""
        return [self.layer(i, name) for i in range(len(self.blocks)) for name in self.linears(i)]

    def experts(self, number: int) -> dict[str, Place]:
        """Return the checkpoint's names of the matrices of a block's routed experts that transformers joins."""
        prefix, found = self.prefix(number), dict[str, Place]()
        for of_tensor in self.joined.values():
            found |= {name: place for name, (block, place) in of_tensor.items() if block == number}
        for name, target in self.tensors(prefix).items():
            match, layer = EXPERT.match(name.removesuffix(WEIGHT)), name.removesuffix(WEIGHT)
            if match and layer != name and self.converted(name):
                part, parts = self._sources[name]
                joined = self.model.get_parameter(target)
                rows, columns = self.checkpoint.tensors[name].spec.shape
                if tuple(joined.shape[1:]) == (parts * rows, columns):
                    found[layer] = Place(target.removeprefix(prefix), int(match[2]), part, parts)
        return found

    @cached_property
    def joined(self) -> dict[str, dict[str, tuple[int, Place]]]:
        """The tensors that hold all experts of a layer as [experts, N, K]: those names that each expert's has alone.

        Each name comes with the number of the block and the place in it.
        """
        joined: dict[str, dict[str, tuple[int, Place]]] = {}
        for number, block in enumerate(self.blocks):
            for path, module in block.named_modules():
                if not hasattr(module, "is_transposed") or module.is_transposed or module.has_bias:
                    continue
                # with later releases of transformers than 5.0
                is_gated = getattr(module, "has_gate", hasattr(module, "gate_up_proj"))
                is_concatenated = getattr(module, "is_concatenated", True)
                if not is_gated or not is_concatenated or getattr(module, "has_post_expert_norm", False):
                    continue
                for name, parts in JOINED_PARTS.items():
                    parameter = f"{path}.{name}"
                    tensor = self.stored.get(self.prefix(number) + parameter, "")
                    module_name = joined_experts(tensor)
                    is_float = module_name and self.checkpoint.tensors[tensor].spec.dtype in FLOATS
                    if is_float and tensor == f"{module_name}.{name}":
                        joined[tensor] = {
                            f"{module_name}.{expert}.{part}": (
                                number,
                                Place(parameter, expert, i, len(parts)),
                            )
                            for expert in range(len(module.get_parameter(name)))
                            for i, part in enumerate(parts)
                        }
        return joined

    def with_single_experts(self) -> Checkpoint:
        """Return the checkpoint with a tensor for each matrix of the experts that are `joined`, which it keeps."""
        tensors = dict(self.checkpoint.tensors)
        for tensor, names in self.joined.items():
            (_, dtype, shape), file, start, _ = tensors[tensor]
            for i, (layer, (_, place)) in enumerate(names.items()):  # in the order of their bytes
                spec = TensorSpec(layer + WEIGHT, dtype, (shape[1] // place.parts, shape[2]))
                tensors[spec.name] = storage.StoredTensor(spec, file, start + i * spec.nbytes)
        return replace(self.checkpoint, tensors=tensors)

    def _missing(self) -> list[str]:
        """Return the parameters that the checkpoint lacks: of blocks and, if the model predicts tokens, of its decoder.

        Others may be left out, as poolers, and the head of a model that embeds texts.  vLLM leaves parameters that a
        quantized checkpoint lacks uninitialized.  Where transformers computes parameters of a module from other
        tensors, it alone knows what they need.
        """
        model, stored = self.model, {*self._targets.values()}
        computed = tuple(
            {
                self._targets[name].rsplit(".", 1 if EXPERT.match(name.removesuffix(WEIGHT)) else 2)[0] + "."
                for name in self._sources
            }
        )
        modules = [*self.blocks]
        if self.generates:
            head = (
                None if storage.is_embedding_model(self.checkpoint.folder) else model.get_output_embeddings()
            )
            modules += filter(None, (model.get_decoder(), head))
        needed = {id(parameter) for module in modules for parameter in module.parameters()}
        return [
            name
            for name, parameter in model.named_parameters()
            if id(parameter) in needed
            and name not in stored
            and name not in model.all_tied_weights_keys
            and not name.startswith(computed)
        ]

    def require_tensors(self, widths: Mapping[str, int], is_quantized: Callable[[str, str], bool]) -> None:
        """Raise CheckpointError for a layer without a tensor or with two, and for one that config.json contradicts.

        Args:
            widths: K of layers whose weights may be stored with other columns.
            is_quantized: whether config.json quantizes a linear layer outside the blocks, by the dtype of its weight.
        """
        import transformers

        if missing := self._missing():
            wrapped = next(
                (name for name in self.checkpoint.tensors if name.endswith(f".{missing[0]}")), None
            )
            if wrapped:
                raise CheckpointError(
                    f"tensor names begin with {wrapped.removesuffix(missing[0])!r}; save the model without its wrapper"
                )
            named = architecture_of(self.checkpoint.config)
            if named and not hasattr(transformers, named):
                raise CheckpointError(
                    f"transformers {transformers.__version__} knows no {named}, and its {type(self.model).__name__} "
                    f"needs {missing[0]}, which the checkpoint lacks; serve such a model, as of a draft, as it is"
                )
            raise CheckpointError(f"{missing[0]} is missing ({len(missing)} such); {INCOMPLETE}")
        for name, target in self._targets.items():
            if not self.converted(name) and self.stored[target] != name:
                raise CheckpointError(
                    f"tensors {name} and {self.stored[target]} are both the model's {target}; remove one of them"
                )
        self._require_experts()
        state, layers = self.model.state_dict(), {*self.layers}
        for parameter, name in self.stored.items():
            (_, dtype, stored), layer = self.checkpoint.tensors[name].spec, name.removesuffix(WEIGHT)
            stored = (*stored[:-1], widths[layer]) if layer in widths else stored
            described = state[parameter]
            if stored != tuple(described.shape) and dtype != "U8":
                raise CheckpointError(
                    f"tensor {name} has shape {list(stored)}, but config.json describes {list(described.shape)}; "
                    "fetch the config again"
                )
            module = self.model.get_submodule(parameter.rpartition(".")[0])
            is_weight = isinstance(module, nn.Linear) and layer != name
            if (
                described.is_floating_point()
                and described.dim() < 3  # several experts are refused by their own words
                and dtype not in (*FLOATS, "F64")
                and not (is_weight and (layer in layers or is_quantized(layer, dtype)))
            ):
                raise CheckpointError(
                    f"tensor {name} is {dtype}, which neither config.json nor vLLM takes for quantized; start from the "
                    "original checkpoint"
                )
            if is_weight and module.bias is None and layer + BIAS in self.checkpoint.tensors:
                raise CheckpointError(
                    f"tensor {layer + BIAS} belongs to a layer that has no bias by config.json, so it would be left "
                    "out; fetch the config again"
                )
        block = re.compile(re.escape(self.list_path) + r"\.(\d+)\.")
        numbers = {name: match for name in self.checkpoint.tensors if (match := block.match(name))}
        other = next((name for name, match in numbers.items() if int(match[1]) >= len(self.blocks)), None)
        # models with routed experts may have further blocks, to predict further tokens
        if other and not self._sources:
            raise CheckpointError(
                f"tensor {other} belongs to none of the {len(self.blocks)} blocks of config.json; fetch it again"
            )

    def _require_experts(self) -> None:
        """Raise CheckpointError unless all experts of config.json are stored, each in its shape.

        vLLM cuts larger ones to what it needs, and leaves missing ones uninitialized.
        """
        counts: Counter[tuple[str, int]] = Counter()
        parameters = dict(self.model.named_parameters())  # blocks that predict further tokens have none
        for name, (_, parts) in self._sources.items():
            target = self._targets[name]
            if target not in parameters or not EXPERT.match(name.removesuffix(WEIGHT)):
                continue
            experts, *size = parameters[target].shape
            shape = self.checkpoint.tensors[name].spec.shape
            if len(shape) != 2 or sorted((parts * shape[0], shape[1])) != sorted(size):
                raise CheckpointError(
                    f"tensor {name} has shape {list(shape)}, but by config.json {[size[0] // parts, size[1]]}; fetch "
                    "the config again"
                )
            counts[target, experts * parts] += 1
        for (target, count), found in counts.items():
            if found != count:
                raise CheckpointError(
                    f"{target} has {found} matrices of experts, but config.json describes {count}; fetch it again, "
                    "unless its experts are of several kinds, as for text and images: such models cannot be converted"
                )

    # Tensors and parameters

    @cached_property
    def stored(self) -> dict[str, str]:
        """The tensor that each parameter is stored as, for parameters that are stored unchanged."""
        return {target: name for name, target in self._targets.items() if not self.converted(name)}

    @cached_property
    def limits(self) -> frozenset[str]:
        """The tensors of the checkpoint that are buffers and infinite in a new model, such as the limits of a clamp."""
        buffers = self.model.named_buffers()
        infinite = {name for name, x in buffers if not x.is_meta and bool(x.isinf().any())}
        return frozenset(self.stored[name] for name in infinite if name in self.stored)

    def name_of(self, parameter: str) -> str:
        """Return the tensor that a parameter is stored as, or else that transformers would write for it."""
        from transformers.core_model_loading import revert_weight_conversion

        state = {parameter: self.model.get_parameter(parameter)}
        return self.stored.get(parameter) or next(iter(revert_weight_conversion(self.model, state)))

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors, with their shapes, that transformers would write for the model."""
        from transformers.core_model_loading import revert_weight_conversion

        try:
            tensors = revert_weight_conversion(self.model, self.model.state_dict())
        except Exception as error:  # of experts, of which there may be none
            raise _refused(self.checkpoint.folder, error) from error
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def tensors(self, prefix: str) -> dict[str, str]:
        """Return the tensors that make up the parameters whose names begin with ``prefix``, with their target names."""
        return {name: target for name, target in self._targets.items() if target.startswith(prefix)}

    def reads(self, layer: str) -> bool:
        """Return whether the weight of a layer is a parameter of the model."""
        return layer + WEIGHT in self._targets

    def converted(self, name: str) -> bool:
        """Return whether transformers computes parameters from a tensor, such as by joining the experts of a layer."""
        return name in self._sources

    # What the model is used for

    @property
    def is_tied(self) -> bool:
        """Whether the output head is the embedding: config.json says so, and the class can tie them."""
        return bool(getattr(self.config, TIED, False) and self.model._tied_weights_keys)

    @cached_property
    def head_names(self) -> list[str]:
        """The lm_head's names in the checkpoint and in transformers; none where no tokens are predicted."""
        module = self.model.get_output_embeddings() if self.generates else None
        paths = [name for name, each in self.model.named_modules() if each is module]
        return [*(self.name_of(path + WEIGHT).removesuffix(WEIGHT) for path in paths), *paths]

    @property
    def is_causal(self) -> bool:
        """Whether a token attends to earlier ones alone, as far as any attention module says."""
        modules = (module for block in self.blocks for module in block.modules())
        flags = {bool(module.is_causal) for module in modules if hasattr(module, "is_causal")}
        return True in flags if flags else self.generates

    @property
    def generates(self) -> bool:
        """Whether the model predicts tokens."""
        return bool(self.model.can_generate())


def _linears(block: nn.Module) -> list[str]:
    """Return the names of a block's linear layers, but for routers and gates, which vLLM does not quantize.

    A router has an output for each expert, whose weights are joined in three dimensions in a module beside it, and is
    its parent's only linear layer or beside the experts itself; other layers may have as many outputs.  A gate has one.
    """
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    parents = {name: name.rpartition(".")[0] for name in linears}
    single = [parent for parent, count in Counter(parents.values()).items() if count == 1]
    others = {name for name, module in linears.items() if module.out_features == 1}
    for path, module in block.named_modules():
        beside = path.rpartition(".")[0]
        joined = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        for experts in joined if not isinstance(module, nn.Conv1d) else ():
            others |= {
                name
                for name, parent in parents.items()
                if linears[name].out_features == len(experts)
                and (parent == beside or (parent in single and parent.startswith(beside)))
            }
    return [name for name in linears if name not in others]


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Put parameters of modules that are made on the meta device; buffers stay real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _LargeOnMeta(TorchFunctionMode):
    """Makes tensors of three dimensions and LARGE elements, which will be joined experts, on the meta device.

    Those of a layer of DeepSeek-V3 would need 30 GB, and Llama 4 fills its own with zeros.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func in _FILLS and args:
            size = args[0] if isinstance(args[0], tuple | list) else args
            if len(size) == 3 and all(type(n) is int for n in size) and math.prod(size) >= LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' advice about configs, which concerns its own loading."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _read_config(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Return transformers' config of a checkpoint, without its quantization, and in it that of the language model.

    Raises CheckpointError where transformers finds none of either, or several.
    """
    import transformers

    # transformers writes infinite numbers in a way of its own, which this function reads
    read, _ = transformers.PreTrainedConfig.get_config_dict(checkpoint.folder, local_files_only=True)
    require_few_layers(read, checkpoint.folder)
    values = storage.unquantized_config(read)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{checkpoint.folder / CONFIG}: model_type {shown(kind)} is not known to transformers "
            f"{transformers.__version__}; upgrade transformers if a newer release knows it"
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(values)
        # vLLM reads that of the language model, which transformers 4 wrote alone
        for known in (storage.text_config(checkpoint.config), checkpoint.config):
            if TIED in known:
                config.tie_word_embeddings = known[TIED]
        text = config.get_text_config()
        if not isinstance(text, transformers.PreTrainedConfig):
            raise ValueError(f"a part of a multimodal model, {shown(text)}, in a model_type without parts")
        return config, text
    except Exception as error:  # of many classes, by model
        raise _refused(checkpoint.folder, error) from error


def require_few_layers(values: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError for a count of layers in a config, or in a part of it, that would take forever to make."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            require_few_layers(value, folder)
        elif _COUNT.search(key) and isinstance(value, int) and value > MAX_LAYERS:
            raise CheckpointError(
                f"{folder / CONFIG}: {key} is {value}, at most {MAX_LAYERS} are made; fetch the config again"
            )


def _refused(folder: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:300]
    return CheckpointError(
        f"{folder / CONFIG} describes no model that transformers can build ({type(error).__name__}: {reason}); fetch "
        "the config again"
    )


def _build(checkpoint: Checkpoint, config: Any) -> nn.Module:
    """Return the model with parameters on the meta device: of the class that config.json names, or the usual one."""
    import transformers

    architecture = architecture_of(checkpoint.config)
    named = getattr(transformers, architecture or "", None)
    causal = (architecture or "").endswith("ForCausalLM")
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    is_model = isinstance(named, type) and hasattr(named, "_from_config")
    make: Any = named._from_config if is_model else auto.from_config  # type: ignore[union-attr]
    with meta_parameters(), torch.no_grad():
        for attention in ("sdpa", "eager"):
            # other implementations of experts need memory of their own
            options = {"attn_implementation": attention, "experts_implementation": "eager"}
            try:
                model = make(config, dtype=torch.float32, **options)
                break
            except Exception as error:  # of many classes, by model
                if is_out_of_memory(error):
                    raise
                if attention == "eager" or not isinstance(error, ValueError):
                    raise _refused(checkpoint.folder, error) from error
    built: nn.Module = model.eval()
    return built


def _rename(model: Any, tensors: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Return the parameter of each tensor by transformers' mapping.

    For tensors whose values are converted, also return which of how many kinds that are joined in a parameter they are.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    parameters: dict[str, Tensor] = model.state_dict()
    prefix: str = model.base_model_prefix
    kinds = {
        source: (part, len(converter.source_patterns))
        for converter in converters
        for part, source in enumerate(converter.source_patterns)
    }
    targets, sources = {}, {}
    # in the order of transformers, as some renamings depend on earlier ones
    for name in sorted(tensors, key=dot_natural_key):
        target, source = rename_source_key(name, renamings, converters, prefix, parameters)
        if target not in parameters and name in parameters:
            target, source = rename_source_key(name, [], [], prefix, parameters)
        if target in parameters or source is not None:
            targets[name] = target
        if source is not None:
            sources[name] = kinds[source]
    return targets, sources
