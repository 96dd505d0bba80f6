"""Run a checkpoint's model one transformer block at a time, by transformers' own modules.

The modules hold no weights (see `slidesparse.checkpoint.skeleton`): a `Block` is one of them with float32 tensors read
from the files, or replaced by pruned ones.  What the model passes to its blocks besides hidden states, such as rotary
embeddings and masks, is recorded by running it once with stand-ins for the blocks; the same way, hidden states are
turned into logits::

    ids -> [embedding, ...] -> x -> block 0 -> ... -> block n-1 -> x -> [norm, head, ...] -> logits
            Ends.embed               Block.output                       Ends.logits

The linear layers of a block that read the same tensor are a group.  Groups are found by running the block once.

On a GPU, products of float32 tensors run in TF32 (see `fast_products`), whose factors have three more mantissa bits
than the BF16 that models are served in, and whose sums are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from slidesparse.checkpoint.names import SCALE, WEIGHT, other_use
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import FLOATS, Reader
from slidesparse.errors import CalibrationError, is_out_of_memory

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a block besides hidden states
Groups = tuple[tuple[str, ...], ...]  # names of the linear layers that share an input, in order of execution
# The checkpoint's names of linear layers that share an input, or of the experts whose weights are one tensor in vLLM
LayerGroup = tuple[str, ...]

UNLIMITED = 2**20  # tokens of a sequence where config.json gives no limit
TRACED_TOKENS = 8  # length of the sequence that shows which layers share an input


class _Stop(Exception):  # noqa: N818  not an error
    """Ends a run whose remaining results nobody needs."""


class _StandIn(nn.Module):
    """Stands for a block: keeps what the model passes to it, and returns ``given``, or its input, or ``stops`` the run.

    Args:
        others: what a block returns in a tuple behind its hidden states; None if it returns no tuple.
    """

    x: Tensor
    call: Call

    def __init__(self, block: nn.Module, others: tuple[Any, ...] | None, given: Tensor | None) -> None:
        super().__init__()
        self.stops = False
        self._given, self._others = given, others
        for name, value in vars(block).items():  # that some models read, such as attention_type
            if not name.startswith("_") and not isinstance(value, nn.Module):
                self.__dict__.setdefault(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.x, *others = args or (kwargs.pop("hidden_states"),)
        self.call = tuple(others), kwargs
        if self.stops:
            raise _Stop
        y = self.x if self._given is None else self._given
        return y if self._others is None else (y, *self._others)


class Model:
    """The model of a checkpoint, on ``device``: ``blocks`` between which hidden states are ``hidden`` wide.

    Raises CalibrationError for a model whose blocks cannot be run alone.
    """

    def __init__(self, skeleton: Skeleton, device: torch.device) -> None:
        self.skeleton, self.checkpoint, self.device = skeleton, skeleton.with_single_experts(), device
        self.blocks = len(skeleton.blocks)
        self.hidden, self.vocabulary = (
            int(getattr(skeleton.text_config, key, 0)) for key in ("hidden_size", "vocab_size")
        )
        self.is_causal = skeleton.is_causal  # whether tokens attend to earlier ones alone
        self.other_use = other_use(self.checkpoint.folder, self.checkpoint.config)
        for module in skeleton.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
        self._calls: dict[tuple[int, int], list[Call]] = {}
        self._groups: dict[str, Groups] = {}
        self.roles: dict[str, Any] = {}  # what was found of blocks of a `structure`, and of the model's ENDS
        self._require_equal_calls()

    def __reduce__(self) -> tuple[Any, ...]:  # for other processes, which make it anew
        return Model, (self.skeleton, self.device)

    @property
    def longest(self) -> int:
        """The longest sequence in tokens; for LongRoPE, of those that its short factors are for."""
        config = self.skeleton.text_config
        longest = int(getattr(config, "max_position_embeddings", None) or UNLIMITED)
        of_tokens = None
        with suppress(NotImplementedError):  # of models that embed hashes of characters, such as Canine
            of_tokens = self.skeleton.model.get_input_embeddings()
        for module in self.skeleton.model.modules():
            # RoBERTa numbers positions from the row after that of padding
            is_embedding = isinstance(module, nn.Embedding) and module is not of_tokens
            if is_embedding and module.num_embeddings == longest and module.padding_idx:
                return int(longest - module.padding_idx - 1)
        rope = getattr(config, "rope_parameters", None) or {}
        if "short_factor" in rope:
            longest = min(longest, rope.get("original_max_position_embeddings") or longest)
        return longest

    # Blocks

    def groups(self, number: int) -> Groups:
        """Return the groups of a block's linear layers, in order of execution."""
        structure = self.structure(number)
        if structure not in self._groups:
            self._groups[structure] = self._trace(number)
        return self._groups[structure]

    def structure(self, number: int) -> str:
        """Return a text that is equal for blocks that differ in nothing but their weights and their place."""
        block = self.skeleton.blocks[number]
        settings = [
            f"{name}.{key}={value}"
            for name, module in block.named_modules()
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str) and key != "layer_idx"
        ]
        return "\n".join([repr(block), *settings])

    def linears(self, number: int) -> dict[str, str]:
        """Return the checkpoint's names of the linear layers of a block, group by group, by their names in it."""
        return {name: self.skeleton.layer(number, name) for group in self.groups(number) for name in group}

    def layer_groups(self, number: int) -> list[LayerGroup]:
        """Return the groups of all layers of a block that may be pruned, in order of execution, routed experts last."""
        skeleton = self.skeleton
        linears = [tuple(skeleton.layer(number, name) for name in group) for group in self.groups(number)]
        experts: dict[str, LayerGroup] = {name: () for name, _ in skeleton.blocks[number].named_parameters()}
        for name, place in skeleton.experts(number).items():
            experts[place.parameter] += (name,)
        return [*linears, *filter(None, experts.values())]

    def fused(self) -> list[list[str]]:
        """Return the checkpoint's names of all linear layers, those that vLLM may fuse into one together.

        These share an input and a parent module, such as q, k and v.
        """
        fused: dict[tuple[int, int, str], list[str]] = {}
        for number in range(self.blocks):
            for i, group in enumerate(self.groups(number)):
                for name in group:
                    place = number, i, name.rpartition(".")[0]
                    fused.setdefault(place, []).append(self.skeleton.layer(number, name))
        return [*fused.values()]

    def load(self, reader: Reader, number: int) -> Block:
        """Read a block, its tensors in float32."""
        prefix = self.skeleton.prefix(number)
        weights, scales = {}, {}
        for parameter, x in self._load(reader, self.skeleton.tensors(prefix)).items():
            name = parameter.removeprefix(prefix)
            stored = self.skeleton.stored.get(parameter, "")
            scale = stored.removesuffix(WEIGHT) + SCALE
            if stored.endswith(WEIGHT) and scale in self.checkpoint.tensors:  # codes of BitNet
                scales[name.removesuffix(WEIGHT)] = reader.whole(scale).to(self.device)
                x = x * scales[name.removesuffix(WEIGHT)]
            weights[name] = x
        return Block(self, number, weights, scales)

    def call(self, number: int, samples: int, tokens: int) -> Call:
        """Return what the model passes to a block besides hidden states [samples, tokens, hidden]."""
        shape = samples, tokens
        if shape not in self._calls:
            self._calls[shape] = self._record(torch.zeros(shape, dtype=torch.long), 0.0)
        return self._calls[shape][number]

    def _record(self, ids: Tensor, weight: float) -> list[Call]:
        """Record the arguments of all blocks for ``ids``, with all weights outside of blocks equal to ``weight``."""
        with torch.inference_mode(False), torch.no_grad():
            _, stand_ins = self.run_ends(self._placeholders(self.skeleton.model, weight), ids, stop=-1)
        return [stand_in.call for stand_in in stand_ins]

    @cached_property
    def other_outputs(self) -> tuple[Any, ...] | None:
        """The values that a block returns in a tuple behind its hidden states; None if it returns no tuple."""
        ids = torch.zeros(1, TRACED_TOKENS, dtype=torch.long)
        with torch.inference_mode(False), torch.no_grad():
            _, (first, *_) = self.run_ends(self._placeholders(self.skeleton.model, 0.0), ids, stop=0)
            args, kwargs = first.call
            block = self.skeleton.blocks[0]
            with self._explained():
                out = functional_call(block, self._placeholders(block, 0.0), (first.x, *args), kwargs)
        return out[1:] if isinstance(out, tuple) else None

    def _placeholders(self, module: nn.Module, value: float) -> dict[str, Tensor]:
        """Return parameters of ``module`` but for those of blocks below it, all equal to ``value``, in no memory."""
        return {
            name: torch.full((), value, device=self.device).expand(parameter.shape)
            for name, parameter in module.named_parameters()
            if not name.startswith(self.skeleton.list_path + ".")
        }

    def run_ends(
        self, weights: Mapping[str, Tensor], ids: Tensor, x: Tensor | None = None, stop: int | None = None
    ) -> tuple[Any, list[_StandIn]]:
        """Run the model on ids [samples, tokens]; return its output, and what stood for its blocks.

        Args:
            x: what they return; None for what they are passed.
            stop: the index of the block that ends the run, whose output is then None.

        Raises CalibrationError for a model that transformers cannot run on text.
        """
        model, path = self.skeleton.model, self.skeleton.list_path
        parent, _, name = path.rpartition(".")
        holder = model.get_submodule(parent)
        blocks = getattr(holder, name)
        others = None if stop == 0 else self.other_outputs
        stand_ins = [_StandIn(block, others, x) for block in self.skeleton.blocks]
        if stop is not None:
            stand_ins[stop].stops = True
        setattr(holder, name, nn.ModuleList(stand_ins))
        inputs: dict[str, Any] = {"input_ids": ids.to(self.device)}
        gradients = torch.is_grad_enabled()
        try:
            # Some models replace their buffers, which must be no tensors of the inference mode
            with self._explained(), torch.inference_mode(False), torch.set_grad_enabled(gradients):
                out = functional_call(model, dict(weights), (), inputs, tie_weights=False, strict=False)
        except _Stop:
            out = None
        finally:
            setattr(holder, name, blocks)
        for number, stand_in in enumerate(stand_ins[:1] if stop == 0 else stand_ins):
            if not hasattr(stand_in, "call"):
                raise CalibrationError(
                    f"{type(model).__name__} does not run its block {number} on text; prune the model without --calib"
                )
        return out, stand_ins

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise CalibrationError for what transformers raises when it runs the model."""
        try:
            yield
        except _Stop:
            raise
        except Exception as error:  # of any class, by model
            if is_out_of_memory(error):
                raise
            raise CalibrationError(
                f"transformers cannot run {type(self.skeleton.model).__name__} on text ({type(error).__name__}: "
                f"{error}); prune the model without --calib"
            ) from error

    def finish(self, logits: Tensor) -> Tensor:
        """Return a language model's logits for the output of its head, both [rows, vocabulary].

        They differ for models that scale or limit logits.
        """
        head = self.skeleton.model.get_output_embeddings()
        x, ids = torch.zeros(1, 1, self.hidden, device=self.device), torch.zeros(1, 1, dtype=torch.long)
        head.forward = lambda _: logits[None]
        try:
            out, _ = self.run_ends(self._placeholders(self.skeleton.model, 0.0), ids, x)
        finally:
            del head.forward
        finished: Tensor = out.logits[0]
        return finished

    def _require_equal_calls(self) -> None:
        """Raise CalibrationError if what blocks are passed depends on tokens, weights or other blocks."""
        ids = torch.arange(TRACED_TOKENS)[None] % max(1, self.vocabulary)
        first, second = self._record(torch.zeros_like(ids), 0.0), self._record(ids, 1.0)
        passed, others = _tensors(first), _tensors(second)
        from_blocks = {id(value) for value in self.other_outputs or ()}
        differ = len(passed) != len(others) or not all(map(torch.equal, passed, others))
        if differ or any(id(value) in from_blocks for value in passed):
            raise CalibrationError(
                f"the blocks of {type(self.skeleton.model).__name__} read more than hidden states and positions, so "
                "that they cannot be run one at a time; prune the model without --calib"
            )

    def _trace(self, number: int) -> Groups:
        """Return the groups of a block's linear layers by running it with weights of zero."""
        block = self.skeleton.blocks[number]
        linears = set(self.skeleton.linears(number))
        inputs: list[Tensor] = []  # kept, so that no two have the same address
        groups: dict[tuple[int, torch.Size], list[str]] = {}

        def record(name: str, x: Tensor) -> None:
            inputs.append(x)
            members = groups.setdefault((x.data_ptr(), x.shape), [])
            if not any(name in group for group in groups.values()):
                members.append(name)

        x = torch.zeros(1, TRACED_TOKENS, self.hidden, device=self.device)
        args, kwargs = self.call(number, 1, TRACED_TOKENS)
        with torch.inference_mode(False), torch.no_grad(), reading(block, linears, record), self._explained():
            functional_call(block, self._placeholders(block, 0.0), (x, *args), kwargs)
        order = {name: i for i, name in enumerate(self.skeleton.linears(number))}
        return tuple(tuple(sorted(group, key=order.__getitem__)) for group in groups.values() if group)

    # Weights

    def ends(self, reader: Reader) -> Ends:
        """Read the weights of the text model outside of its blocks.  Raises CheckpointError for one that is missing.

        Weights that neither the blocks' input nor logits depend on, such as those of a pooler, may be missing.
        """
        model = self.skeleton.model
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        head = model.get_output_embeddings()
        paths = {id(module): name for name, module in model.named_modules()}
        roots = [paths[id(module)] for module in (decoder, head) if module is not None]

        def is_text(name: str) -> bool:
            is_inside = any(not root or name.startswith(root + ".") for root in roots)
            return is_inside and not name.startswith(self.skeleton.list_path + ".")

        tensors = self.skeleton.tensors("").items()
        weights = self._load(reader, {name: target for name, target in tensors if is_text(target)})
        if head:
            tied, embedding = (paths[id(module)] + WEIGHT for module in (head, model.get_input_embeddings()))
            if embedding in weights and (tied not in weights or self.skeleton.is_tied):
                weights[tied] = weights[embedding]
        others, nan = (self._placeholders(model, value) for value in (0.0, math.nan))
        ids = torch.zeros(1, TRACED_TOKENS, dtype=torch.long)
        for name in (name for name in others if name not in weights and is_text(name)):
            ends = Ends(self, {**others, **weights, name: nan[name]})
            with torch.inference_mode(False), torch.no_grad():
                x = ends.embed(ids)
                if bool(x.isnan().any()) or (self.skeleton.generates and bool(ends.logits(x).isnan().any())):
                    self.checkpoint.require(name)
        return Ends(self, others | weights)

    def _load(self, reader: Reader, tensors: Mapping[str, str]) -> dict[str, Tensor]:
        """Read tensors, whose target names are given; return them by the names of parameters."""
        converted = {name for name in tensors if self.skeleton.converted(name)}
        loaded = {
            target: self._read(reader, name) for name, target in tensors.items() if name not in converted
        }
        if converted:
            state = {name: self._read(reader, name) for name in sorted(converted)}
            loaded |= _convert(self.skeleton.model, state, self.device)
        return loaded

    def _read(self, reader: Reader, name: str) -> Tensor:
        """Read a tensor, floats and codes in float32, without a copy of all of it in host memory."""
        spec = reader.checkpoint.require(name)
        if spec.dtype not in (*FLOATS, "F64", "I8"):
            return reader.whole(name).to(self.device)
        x = torch.empty(spec.rows, spec.columns, device=self.device)
        for rows in spec.chunks():
            x[rows] = reader.rows(name, rows).to(self.device)
        return x.view(spec.shape)


class Ends:
    """The embedding of a model, and its last norm and head, with their weights."""

    def __init__(self, model: Model, weights: Mapping[str, Tensor]) -> None:
        self._model, self.weights = model, weights

    def embed(self, ids: Tensor) -> Tensor:
        """Return the input of the first block, float32 [samples, tokens, hidden], for ids [samples, tokens]."""
        _, (first, *_) = self._model.run_ends(self.weights, ids, stop=0)
        return first.x

    def logits(self, x: Tensor) -> Tensor:
        """Return a language model's logits, [..., vocabulary], for the output [..., hidden] of its last block."""
        rows = x.reshape(1, -1, x.shape[-1])
        out, _ = self._model.run_ends(self.weights, torch.zeros(rows.shape[:2], dtype=torch.long), rows)
        logits: Tensor = out.logits
        return logits.view(*x.shape[:-1], -1)


class Block:
    """One transformer block.

    Args:
        weights: the block's parameters by name, such as "mlp.down_proj.weight", in float32.
        scales: [N, 1] of the linear layers whose weights are ternary codes times scales, by name.
    """

    def __init__(
        self,
        model: Model,
        number: int,
        weights: dict[str, Tensor],
        scales: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model, self.number, self.weights, self.scales = model, number, weights, scales or {}
        self.groups = model.groups(number)
        # Called with the name of each linear layer and its input, which the result replaces
        self.read: Callable[[str, Tensor], Tensor] | None = None

    @property
    def module(self) -> nn.Module:
        """The module of transformers, without weights."""
        return self.model.skeleton.blocks[self.number]

    @property
    def linears(self) -> list[str]:
        """The names of all linear layers, in order of execution."""
        return [name for group in self.groups for name in group]

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters."""
        return sum(w.nbytes for w in self.weights.values())

    def copy(self) -> Block:
        """Return a block that shares this one's tensors; replacing some in one does not affect the other."""
        return Block(self.model, self.number, dict(self.weights), self.scales)

    def output(self, x: Tensor) -> Tensor:
        """Return the block's output for its input, both [samples, tokens, hidden]."""
        args, kwargs = self.model.call(self.number, x.shape[0], x.shape[1])
        with reading(self.module, self.linears, self.read) if self.read else nullcontext(), _OwnKeys():
            out = functional_call(self.module, self.weights, (x, *args), kwargs)
        y: Tensor = out[0] if isinstance(out, tuple) else out
        return y

    def input(self, layer: str, x: Tensor) -> Tensor:
        """Return the input of a linear layer, [..., K], for the block's input, with the current weights before it."""
        caught: list[Tensor] = []

        def catch(_: str, found: Tensor) -> None:
            caught.append(found)
            raise _Stop

        with reading(self.module, [layer], catch), suppress(_Stop):
            self.output(x)
        return caught[0]


class _OwnKeys(TorchFunctionMode):
    """Gives each query head keys and values of its own in float32 attention on a GPU.

    Where heads share them, torch has no fused kernel for float32, and the others write all attention weights to memory.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention and kwargs.get("enable_gqa") and len(args) >= 3:
            q, k, v, *others = args
            if q.is_cuda and q.dtype == torch.float32 and not torch.is_autocast_enabled("cuda"):
                k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
                args, kwargs = (q, k, v, *others), {**kwargs, "enable_gqa": False}
        return function(*args, **kwargs)


@contextmanager
def reading(module: nn.Module, names: Iterable[str], read: Callable[[str, Tensor], Any]) -> Iterator[None]:
    """Call ``read`` with name and input of each of these linear layers that runs; a result replaces the input."""
    with ExitStack() as stack:
        for name in names:
            layer = module.get_submodule(name)
            hook = layer.register_forward_pre_hook(lambda _, args, name=name: read(name, args[0]))
            stack.callback(hook.remove)
        yield


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested arguments."""
    return [entry for entry in tree_leaves(value) if isinstance(entry, Tensor)]


def _convert(model: Any, state: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Convert tensors as transformers does when it loads them, such as by joining experts; return parameters."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: Any = get_model_conversion_mapping(model)
    config = LoadStateDictConfig(device_map={"": str(device)}, dtype=torch.float32, weight_mapping=mapping)
    # without a progress bar for each block
    with patch("transformers.core_model_loading.tqdm", lambda names, **_: names, create=True):
        convert_and_load_state_dict_in_model(model, state, config)
    loaded = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                loaded[f"{module_name}.{name}" if module_name else name] = parameter.data
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    return loaded


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Allow TF32 for products of float32 tensors on a GPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
