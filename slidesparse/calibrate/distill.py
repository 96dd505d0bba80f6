"""Distillation: train the remaining weights of all blocks together to match the dense model's predictions.

The loss is the Kullback-Leibler divergence of the pruned model's next tokens from the dense model's, in nats per token.
Trained are the quantized linear layers, whose pruned weights stay zero, and the vectors of blocks: norms and biases.
The rest, such as embeddings and lm_head, does not change::

    ids --+--> dense blocks --> h --+
          |                         +--> head, in chunks --> KL divergence, and its gradient to x
          +--> pruned blocks -> x --+

The pruned blocks hold weights as they will be served, quantized and dequantized, and round the inputs of layers as they
will be, too.  Their gradients are applied to a float32 copy (straight-through), from which they are computed again once
a step::

    gradient --> Adam --> value (float32) --> quantize --> weight of the next step (BF16 on a GPU)

On a GPU, blocks are compiled.  With several, there is a process for each, which takes its share of the samples of a
step.  It holds all of both models where one GPU has the memory, and otherwise its share of the rows of all blocks'
tensors (PyTorch's FSDP2).  The number of GPUs changes the order of sums, but nothing else.

The learning rate decays with elapsed time, so unlike the rest of calibration, distillation is not deterministic.  Every
few minutes the model is evaluated on held-out text, and the best weights are kept.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import pickle
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn

from slidesparse.calibrate.finetune import BETAS, fake_quantize, learning_rate_factor
from slidesparse.calibrate.inputs import free_bytes
from slidesparse.calibrate.losses import perplexity_change
from slidesparse.calibrate.model import Model, fast_products
from slidesparse.calibrate.resume import DISTILLED, DISTILLING, WorkFolder, served_weight
from slidesparse.calibrate.task import Task
from slidesparse.checkpoint.names import SCALE, WEIGHT
from slidesparse.checkpoint.storage import NAMES as DTYPE_NAMES
from slidesparse.checkpoint.storage import Reader, TensorSpec
from slidesparse.errors import CalibrationError, EnvironmentFault, SlideSparseError
from slidesparse.progress import Progress
from slidesparse.quantize import NAMES, quantize_rows

# Adam's peak learning rate, relative to the root mean square of a tensor: RATE for each nat of divergence at the start,
# and no more than MAX_RATE.  In trials of 72 s each on an H100, with steps of 32768 tokens of mixed text, the best
# rates were 0.001 for SmolLM2-135M at 6:8 (0.09 nats; 0.003: 8% more divergence) and 0.006 at 2:4 (0.57 nats;
# 0.003: 3%, 0.012: 4%, 0.02: 18% more), and 0.0005 for Qwen2.5-Coder-0.5B at 6:8 (0.05 nats; 0.0015: 4%).  Half of the
# tokens a step, at three quarters of the rate, left 7% less divergence in 192 s (SmolLM2 at 2:4).
RATE, MAX_RATE = 0.0075, 0.003
EPSILON = 1e-10  # Adam's epsilon
PRODUCTS = {"cpu": torch.float32, "cuda": torch.bfloat16}  # dtype of weights and activations
STEP_TOKENS = {"cpu": 2048, "cuda": 16384}  # of all processes together
PASS_TOKENS = {"cpu": 2048, "cuda": 16384}  # of a forward pass of one process
SAVE_SECONDS = 180.0  # least time between two evaluations, each of which saves the state
SAVE_TIMEOUT = timedelta(hours=1)  # of the processes that wait until the first has written the state
SAVE_PART = 10  # evaluations take at most 1 / SAVE_PART of the time
FACTS = "facts"  # tensor saved with the weights: seconds, steps, initial and best losses, float64
LOGITS_PER_CHUNK = 2**27  # logits computed at a time
GRAPHS = 64  # compiled graphs of one function: for blocks of other structures, with and without gradients

Opened = Callable[[Task, Reader, WorkFolder], Reader]  # the dense model's reader, from that of its checkpoint
Shard = tuple[int, Tensor]  # the rows of a tensor in all processes, and those of this one


@dataclass(frozen=True)
class Loss:
    """The distance of a model from the dense one on held-out text, in nats per token."""

    divergence: float  # KL divergence of the next-token distributions
    entropy: float  # cross-entropy above that of the dense model


@dataclass
class Distilled:
    """The outcome of a distillation, so far."""

    seconds: float  # of training
    steps: int
    before: Loss
    after: Loss

    @property
    def summary(self) -> str:
        """The outcome as text."""
        losses = (f"{100 * perplexity_change(loss.entropy):+.2f}%" for loss in (self.before, self.after))
        return (
            f"held-out perplexity relative to the dense model: {' -> '.join(losses)}; {self.steps} steps in "
            f"{self.seconds / 60:.3g} minutes"
        )


@torch.inference_mode(False)
def distill(task: Task, reader: Reader, work: WorkFolder, opened: Opened, progress: Progress) -> Distilled:
    """Train the finished blocks in ``work``, and save the best tensors there, in the file DISTILLED.

    An interrupted run continues from its last save, on any number of GPUs.

    Args:
        task: with text to distill with.
        reader: of the dense model that the blocks were pruned from.
        opened: a function that other processes can import, which returns such a reader.

    Raises CalibrationError when losses are not finite.
    """
    assert task.texts
    if task.device.type == "cuda":
        torch.cuda.empty_cache()  # pieces of other sizes, of pruning
    done = _read_outcome(work)
    if done is None or done.seconds < 60 * task.calibration.training_minutes:
        if (processes := _processes(task.device)) == 1:
            _train(task, reader, work, progress)
        else:
            _run_processes(processes, task, work, opened, progress)
        done = _read_outcome(work)
        assert done
    return done


# Room


def disk_bytes(task: Task) -> int:
    """Return the peak bytes of saved state: weights and moments, and codes, each next to the file that it replaces."""
    return 2 * (4 + 2 + 2 + 1) * _trained_weights(task) if task.texts else 0


def memory_bytes(task: Task, processes: int, keeps: bool = False) -> int:
    """Estimate the bytes of memory that distillation takes on each device.

    Args:
        processes: the number of devices that share the tensors of blocks.
        keeps: whether all values that gradients depend on are kept, or only the inputs of blocks.
    """
    assert task.texts
    model, kind = task.model, task.device.type
    size, blocks = PRODUCTS[kind].itemsize, range(model.blocks)
    specs = [
        [model.checkpoint.tensors[name].spec for name in model.skeleton.tensors(model.skeleton.prefix(i))]
        for i in blocks
    ]
    weights = [sum(spec.rows * spec.columns for spec in block) for block in specs]
    # Values of a token that the linear layers of a block read and write
    width = max(sum(spec.rows + spec.columns for spec in block if len(spec.shape) == 2) for block in specs)
    # Weight, gradient, value and moments; weights that are fixed, of both models
    trained = _trained_weights(task)
    shared = (2 * size + 4 + 2 + 2) * trained + size * (2 * sum(weights) - trained)
    tokens = max(PASS_TOKENS[kind], len(task.texts[0].ids[0]))
    return (
        shared // processes
        + 2 * model.hidden * model.vocabulary * (4 + size)
        + (8 + 2 * size) * max(weights)  # a block as it is read, or gathered from all processes
        + size * tokens * (model.hidden * (model.blocks + 8) + (model.blocks if keeps else 3) * width)
        + 4 * size * LOGITS_PER_CHUNK
    )


def require_memory(task: Task) -> str:
    """Describe the time and memory that distillation takes.  Raises EnvironmentFault if memory is short."""
    assert task.texts
    count = _processes(task.device)
    needed, available = memory_bytes(task, count) / 1e9, free_bytes(task.device) / 1e9
    place = f"the device {task.device}" if count == 1 else f"each of {count} GPUs"
    if needed > available:
        raise EnvironmentFault(
            f"--distill trains all layers at once, which takes about {needed:.0f} GB of memory, but {place} has "
            f"{available:.0f} GB; leave --distill out, or use GPUs with more memory, or more of them"
        )
    return (
        f"{task.calibration.training_minutes:g} minutes on {task.texts[0].summary}; about {needed:.1f} GB of memory"
        + (f" on {place}" if count > 1 else "")
    )


def _trained_weights(task: Task) -> int:
    """Return how many weights of matrices are trained, zeros included."""
    specs = (task.model.checkpoint.require(name + WEIGHT) for name in {*task.layers, *task.skipped})
    return sum(spec.rows * spec.columns for spec in specs)


# Processes


def _processes(device: torch.device) -> int:
    """Return how many processes train: one for each visible GPU."""
    return max(1, torch.cuda.device_count()) if device.type == "cuda" else 1


def _run_processes(count: int, task: Task, work: WorkFolder, opened: Opened, progress: Progress) -> None:
    """Train in ``count`` processes.  Raises what one of them raises."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

    queue = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = count, f"file://{folder}/store", pickle.dumps((task, work, opened)), queue
        context = start_processes(_worker, arguments, count, join=False, start_method="spawn")
        try:
            is_over = False
            while not is_over:
                is_over = context.join(timeout=0.2)
                _report(queue, progress)
        except ProcessExitedException as error:
            raise EnvironmentFault(
                f"a process of --distill ended early ({error}), possibly as host memory is short; free some, and run "
                "the same command again with --resume"
            ) from error
        except ProcessRaisedException:
            _report(queue, progress)
            raise
        finally:
            for process in context.processes:
                process.kill()


def _report(queue: Any, progress: Progress) -> None:
    """Pass on progress, and raise an error, that processes have sent."""
    while not queue.empty():
        message = queue.get()
        if isinstance(message, Exception):
            raise message
        progress(*message)


def _worker(rank: int, count: int, store: str, pickled: bytes, queue: Any) -> None:
    """Train as process ``rank`` of ``count``; the first sends its progress."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # they are on one machine
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    try:
        task, work, opened = pickle.loads(pickled)
        backend = "cpu:gloo,cuda:nccl" if task.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store, SAVE_TIMEOUT, rank=rank, world_size=count)
        with task.model.checkpoint.reader() as reader:
            dense = opened(task, reader, work)
            _train(task, dense, work, lambda *message: queue.put(message) if rank == 0 else None)
        dist.barrier()  # no connection is closed that another process uses
        dist.destroy_process_group()
    except (SlideSparseError, torch.OutOfMemoryError) as error:
        queue.put(error)
        raise


def _train(task: Task, reader: Reader, work: WorkFolder, progress: Progress) -> None:
    """Train as the only process, or one of several."""
    import torch._functorch.config as functorch

    world = dist.get_world_size() if dist.is_initialized() else 1
    available = torch.tensor(free_bytes(task.device))
    if world > 1:
        dist.all_reduce(available, dist.ReduceOp.MIN)
    shares = world if memory_bytes(task, 1, keeps=True) > available else 1
    recomputes = memory_bytes(task, shares, keeps=True) > available
    with (
        torch.no_grad(),
        fast_products(task.device),
        torch._dynamo.config.patch(recompile_limit=GRAPHS),
        functorch.patch(activation_memory_budget=0.0 if recomputes else 1.0),
    ):
        _Training(task, reader, work, shares > 1).run(progress)


# Networks


class _Network(nn.Module):
    """A model of transformers without its head: returns the head's input [samples, tokens, hidden] for ids.

    Args:
        ends: the parameters outside of blocks.
    """

    x: Tensor

    def __init__(self, model: Model, ends: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.model = copy.deepcopy(model.skeleton.model)
        for name, parameter in ends.items():
            self.put(name, parameter)
        self.blocks = list(self.model.get_submodule(model.skeleton.list_path))
        self.head = self.model.get_output_embeddings()
        self.head.forward = self._keep

    def put(self, name: str, x: Tensor, is_trained: bool = False) -> None:
        """Set a parameter or a buffer."""
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        is_made = leaf in module._buffers or isinstance(x, nn.Parameter)  # FSDP2 tells parameters by identity
        setattr(module, leaf, x if is_made else nn.Parameter(x, requires_grad=is_trained))

    def forward(self, ids: Tensor) -> Tensor:
        self.model(input_ids=ids, use_cache=False)
        return self.x.clone()  # FSDP2 warns of a view

    def _keep(self, x: Tensor) -> Tensor:
        self.x = x
        return x[..., :1]

    def logits(self, x: Tensor) -> Tensor:
        """Return the head's output [..., vocabulary] for its input."""
        return F.linear(x, self.head.weight, self.head.bias)


class _Weight:
    """A trained tensor, of which this process has the rows from ``start`` on, in float32, and Adam's moments.

    Args:
        name: of the checkpoint's tensor.
        parameter: of the pruned model.
        value: all rows.
        dtype: of the quantization; None for a vector.
    """

    def __init__(
        self, name: str, parameter: Tensor, value: Tensor, dtype: torch.dtype | None, rank: int
    ) -> None:
        self.name, self.parameter, self.dtype, self.count = name, parameter, dtype, len(value)
        self.size = (value.square().sum() / (value != 0).sum().clamp(min=1)).sqrt()
        local, self.start = _local(parameter), 0
        if len(local) != len(value):
            world = dist.get_world_size()
            self.start = min(rank * -(-len(value) // world), len(value))
        self.value = value[self.start : self.start + len(local)].clone()
        self.moment, self.square = (torch.zeros_like(self.value, dtype=torch.bfloat16) for _ in range(2))

    def state(self) -> dict[str, Shard]:
        """Return what training continues from."""
        parts = {"value": self.value, "moment": self.moment, "square": self.square}
        return {f"{self.name}.{part}": (self.count, x) for part, x in parts.items()}

    def output(self) -> dict[str, Shard]:
        """Return the tensors of the checkpoint: codes and scales, or the vector."""
        if self.dtype is None:
            return {self.name: (self.count, self.value)}
        names = self.name, self.name.removesuffix(WEIGHT) + SCALE
        parts = quantize_rows(self.value, self.dtype)
        return {name: (self.count, x) for name, x in zip(names, parts, strict=True)}


def _local(x: Any) -> Tensor:
    """Return this process's rows of a tensor that may be distributed."""
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def _served(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a trained tensor as it will be served."""
    return value if dtype is None else fake_quantize(value, dtype)


def _update(
    weights: Sequence[tuple[Tensor, ...]], dtypes: Sequence[torch.dtype | None], rates: Tensor
) -> None:
    """Update the tensors of a block by Adam (arXiv 1412.6980); zeros stay zero.

    Args:
        weights: for each tensor its value, moments, gradient, place for the served one, and root mean square.
        rates: [5] learning rate, one minus each of BETAS, and one minus their powers, of the number of the step.
    """
    rate, first, second, first_sum, second_sum = rates.unbind()
    for (value, moment, square, gradient, served, size), dtype in zip(weights, dtypes, strict=True):
        g = gradient.float()
        mean, squares = moment.float().lerp(g, first), square.float().lerp(g * g, second)
        moment.copy_(mean)
        square.copy_(squares)
        change = mean / first_sum / ((squares / second_sum).sqrt() + EPSILON)
        value.sub_(torch.where(value != 0, change, 0.0) * (rate * size))
        served.copy_(_served(value, dtype))


def _compare(logits: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence [rows] from the ``dense`` logits [rows, vocabulary], and its gradient to ``logits``."""
    predicted, expected = logits.float().log_softmax(-1), dense.float().log_softmax(-1)
    shares = expected.exp()
    return (shares * (expected - predicted)).sum(-1), (predicted.exp() - shares).to(logits.dtype)


# Training


class _Training:
    """The training of one process.

    Args:
        shards: whether processes share the rows of blocks' tensors; otherwise each has all of them.
    """

    def __init__(self, task: Task, reader: Reader, work: WorkFolder, shards: bool) -> None:
        assert task.texts
        model, self._device = task.model, task.device
        self._task, self._work, self._dtype, self._shards = task, work, NAMES[task.quant], shards
        self._rank, self._world = 0, 1
        if dist.is_initialized():
            self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._is_gpu = self._device.type == "cuda"
        self._product_dtype = PRODUCTS[self._device.type]
        self._training_ids, self._validation_ids = (torch.stack(samples.ids) for samples in task.texts)
        length = self._training_ids.shape[1]
        per_step, per_pass = (
            max(1, tokens[self._device.type] // length) for tokens in (STEP_TOKENS, PASS_TOKENS)
        )
        each = -(-min(len(self._training_ids), per_step) // self._world)
        self._passes = -(-each // per_pass)  # of a step
        self._per_pass = -(-each // self._passes)  # samples
        weights = model.ends(reader).weights
        # Tensors that are not contiguous stand for parameters that are not used
        ends = {id(w): w.to(self._product_dtype) if w.is_contiguous() else w for w in weights.values()}
        parameters = {name: nn.Parameter(ends[id(w)], requires_grad=False) for name, w in weights.items()}
        del weights, ends
        self._dense, self._pruned = _Network(model, parameters), _Network(model, parameters)
        # So that the first block has the graph of the others
        embedding = self._pruned.model.get_input_embeddings()
        embedding.register_forward_hook(lambda _, __, x: x.requires_grad_(torch.is_grad_enabled()))
        self._round_input = partial(_round_input, dtype=self._dtype)
        self._weights: list[list[_Weight]] = []  # by block
        with work.tensors().reader() as codes:
            for number in range(model.blocks):
                self._load(reader, codes, number)
        for network in (self._dense, self._pruned):
            self._shard(network, ignored={*parameters.values()})
        probe = torch.randn(2, len(self._dense.head.weight), device=self._device)
        self._finishes = not torch.equal(model.finish(probe), probe)
        self._update, self._compare = self._compiled(_update), self._compiled(_compare)
        self._done = Distilled(0.0, 0, *[Loss(math.inf, math.inf)] * 2)

    def _load(self, reader: Reader, codes: Reader, number: int) -> None:
        """Load a block of both networks."""
        task, model, prefix = self._task, self._task.model, self._task.model.skeleton.prefix(number)
        block, trained = model.load(reader, number), dict[str, tuple[Tensor, torch.dtype | None]]()
        quantized = task.quantized(number)
        parameters = {name for name, _ in block.module.named_parameters()}
        for name, w in block.weights.items():
            self._dense.put(prefix + name, w.to(self._product_dtype))
            full = quantized.get(name.removesuffix(WEIGHT), "") if name.endswith(WEIGHT) else ""
            if full in task.layers:
                w = served_weight(codes, full, self._device)
            if full or (w.dim() == 1 and name in parameters and prefix + name in model.skeleton.stored):
                trained[name] = w, self._dtype if full else None
                w = _served(*trained[name])
            self._pruned.put(prefix + name, w.to(self._product_dtype, copy=name in trained), name in trained)
        pruned = self._pruned.blocks[number]
        for name in quantized:
            pruned.get_submodule(name).register_forward_pre_hook(self._round_input)
        for module in (self._dense.blocks[number], pruned):
            module.forward = self._compiled(module.forward)
            self._shard(module)
        self._weights.append(
            [
                _Weight(model.skeleton.stored[prefix + name], pruned.get_parameter(name), *values, self._rank)
                for name, values in trained.items()
            ]
        )

    def _compiled(self, function: Any) -> Any:
        return torch.compile(function, dynamic=False) if self._is_gpu else function

    def _shard(self, module: nn.Module, ignored: set[nn.Parameter] | None = None) -> None:
        """Spread the rows of the parameters of a module over all processes, if they share them."""
        if self._shards:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            mesh = init_device_mesh(self._device.type, (self._world,))
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)

    def run(self, progress: Progress) -> None:
        """Train until the time is up."""
        limit, total = 60 * self._task.calibration.training_minutes, 4 * _trained_weights(self._task)
        if not self._restore():
            self._done.before = self._done.after = self._validation_loss()
            if not math.isfinite(self._done.after.divergence):
                raise CalibrationError(
                    "the pruned model's predictions on the text of --distill are not finite (NaN or Inf); leave "
                    "--distill out, or prune to a milder pattern"
                )
        if self._is_gpu:
            float(self._step(torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])))  # compiles, and changes nothing
        started = saved = time.monotonic()
        peak = min(RATE * self._done.before.divergence, MAX_RATE)
        pause, previous = SAVE_SECONDS, None
        while self._done.seconds < limit:
            rate = peak * learning_rate_factor(self._done.seconds / limit)
            powers = (1 - beta ** (self._done.steps + 1) for beta in BETAS)
            loss = self._step(torch.tensor([rate, *(1 - beta for beta in BETAS), *powers]))
            self._done.steps += 1
            shown = float(loss if previous is None else previous)  # the GPU always has a step to do
            now, previous = time.monotonic(), loss
            tokens = self._world * self._passes * self._per_pass * self._training_ids.shape[1]
            detail = f"{tokens / max(now - started, 1e-9):.3g} tokens/s, divergence {shown:.4f}"
            self._done.seconds, since = self._agreed(self._done.seconds + now - started, now - saved)
            started = now
            progress("distilling", int(total * min(1.0, self._done.seconds / limit)), total, detail)
            if self._done.seconds >= limit or since > pause:
                started = time.monotonic()
                self._save(self._done.seconds >= limit)
                saved, previous = time.monotonic(), None
                pause, started = max(SAVE_SECONDS, SAVE_PART * (saved - started)), saved

    def _agreed(self, *seconds: float) -> list[float]:
        """Return the values of the first process."""
        values = torch.tensor(seconds, dtype=torch.float64)
        if self._world > 1:
            dist.broadcast(values, 0)
        return values.tolist()

    def _step(self, rates: Tensor) -> Tensor:
        """Train on the samples of the next step, and return their mean divergence; for ``rates`` see `_update`."""
        each = self._passes * self._per_pass
        first = (self._done.steps * self._world + self._rank) * each
        ids = self._training_ids[_samples(len(self._training_ids), first, each)].to(self._device)
        losses = []
        for some in ids.split(self._per_pass):
            target = self._dense(some)
            with torch.enable_grad():
                x = self._pruned(some)
            slopes = []
            for rows, dense_rows in self._chunks(x.detach(), target):
                logits, dense = self._pruned.logits(rows), self._finish(self._dense.logits(dense_rows))
                with torch.set_grad_enabled(self._finishes):
                    finished = self._finish(logits.requires_grad_(self._finishes))
                loss, slope = self._compare(finished.detach(), dense)
                if self._finishes:
                    (slope,) = torch.autograd.grad(finished, logits, slope)
                losses.append(loss.sum())
                slopes.append(slope @ self._pruned.head.weight)
            x.backward(torch.cat(slopes).view_as(x) / ids.numel())
        rates = rates.to(self._device, non_blocking=True)
        for weights in self._weights:
            used = [w for w in weights if w.parameter.grad is not None]
            tensors = [
                (w.value, w.moment, w.square, gradient, _local(w.parameter.detach()), w.size)
                for w, gradient in zip(used, self._gradients(used), strict=True)
            ]
            self._update(tensors, [w.dtype for w in used], rates)
        self._pruned.zero_grad()
        return self._summed(torch.stack(losses).sum() / (ids.numel() * self._world))

    def _gradients(self, weights: Sequence[_Weight]) -> Sequence[Tensor]:
        """Return the gradients of this process's rows, the means of those of all samples of the step."""
        found = [_local(weight.parameter.grad) for weight in weights]
        if self._shards or self._world == 1 or not found:  # FSDP2 has computed the means
            return found
        # Exchanged as one tensor: a block has a dozen, and to start each takes time
        flat = torch.cat([gradient.flatten() for gradient in found]).float()
        parts = (self._summed(flat) / self._world).split([gradient.numel() for gradient in found])
        return [part.view_as(gradient) for part, gradient in zip(parts, found, strict=True)]

    def _summed(self, x: Tensor) -> Tensor:
        """Return the sum of all processes' values."""
        if self._world > 1:
            dist.all_reduce(x)
        return x

    def _chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Split tensors [samples, tokens, ...] into rows whose logits fit into memory."""
        rows = max(1, LOGITS_PER_CHUNK // len(self._dense.head.weight))
        size = 1 << (rows.bit_length() - 1)  # chunks of one size, if the tokens of a step are a power of two
        return zip(*(x.flatten(0, 1).split(size) for x in tensors), strict=True)

    def _finish(self, logits: Tensor) -> Tensor:
        """Return the model's logits for its head's output [rows, vocabulary]."""
        return self._task.model.finish(logits) if self._finishes else logits

    def _validation_loss(self) -> Loss:
        """Return the loss on the held-out samples."""
        count, length = self._validation_ids.shape
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        for first in range(0, count, self._world * self._per_pass):
            # Each process has as many samples; those past the last one do not count
            places = torch.arange(self._per_pass) + first + self._rank * self._per_pass
            ids = self._validation_ids[places.clamp(max=count - 1)].to(self._device)
            counts = (places < count).to(self._device)[:, None].expand_as(ids)
            has_next = counts.clone()
            has_next[:, -1] = False
            x, target = self._pruned(ids), self._dense(ids)
            for rows, dense_rows, following, *used in self._chunks(
                x, target, ids.roll(-1, 1), counts, has_next
            ):
                logits = self._finish(self._pruned.logits(rows))
                dense = self._finish(self._dense.logits(dense_rows))
                lost = [F.cross_entropy(y.float(), following, reduction="none") for y in (logits, dense)]
                parts = self._compare(logits, dense)[0], lost[0] - lost[1]
                totals += torch.stack([(part * use).sum() for part, use in zip(parts, used, strict=True)])
        divergence, entropy = self._summed(totals).tolist()
        return Loss(divergence / (count * length), entropy / (count * (length - 1)))

    # Saving

    def _save(self, end: bool) -> None:
        """Evaluate, keep the best tensors, and save the training state; at the ``end`` without weights and moments."""
        loss = self._validation_loss()
        if loss.divergence < self._done.after.divergence:
            self._done.after = loss
            self._write(DISTILLED, [weight.output() for weights in self._weights for weight in weights])
        seconds, steps, *losses = astuple(self._done)
        facts = [seconds, steps, *chain(*losses)]
        states = [weight.state() for weights in self._weights for weight in weights if not end]
        self._write(DISTILLING, states, {FACTS: torch.tensor(facts, dtype=torch.float64)})

    def _write(
        self, file: str, shards: Iterable[Mapping[str, Shard]], others: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write tensors, of which each process has some rows, and ``others``; the first process writes."""
        parts, others = {name: shard for some in shards for name, shard in some.items()}, others or {}
        shapes = {name: (x.dtype, (count, *x.shape[1:])) for name, (count, x) in parts.items()}
        shapes |= {name: (x.dtype, tuple(x.shape)) for name, x in others.items()}
        specs = [TensorSpec(name, DTYPE_NAMES[dtype], shape) for name, (dtype, shape) in shapes.items()]
        whole = ((name, self._gathered(*shard)) for name, shard in parts.items())
        if self._rank == 0:
            self._work.write_each(file, specs, chain(others.items(), whole))
        else:
            deque(whole, 0)

    def _gathered(self, count: int, rows: Tensor) -> Tensor:
        """Return all ``count`` rows of a tensor."""
        if not self._shards:
            return rows
        padded = rows.new_zeros(-(-count // self._world), *rows.shape[1:])
        padded[: len(rows)] = rows
        raw = padded.view(torch.uint8)
        parts = [torch.empty_like(raw) for _ in range(self._world)]
        dist.all_gather(parts, raw)
        return torch.cat(parts).view(rows.dtype)[:count]

    def _restore(self) -> bool:
        """Load the saved state; return whether there was any."""
        if (done := _read_outcome(self._work)) is None:
            return False
        self._done = done
        with self._work.open_files(DISTILLING).reader() as reader:
            for weight in (weight for weights in self._weights for weight in weights):
                for name, (_, x) in weight.state().items():
                    rows = reader.rows(name, slice(weight.start, weight.start + len(x)))
                    x.copy_(rows.view(x.shape))
                _local(weight.parameter.detach()).copy_(_served(weight.value, weight.dtype))
        return True


def _read_outcome(work: WorkFolder) -> Distilled | None:
    """Return the outcome at the last save, or None."""
    saved = work.open_files(DISTILLING)
    if not saved.files:
        return None
    with saved.reader() as reader:
        seconds, steps, *losses = reader.whole(FACTS).tolist()
    done = Distilled(seconds, int(steps), Loss(*losses[:2]), Loss(*losses[2:]))
    if done.before != done.after and not work.open_files(DISTILLED).files:
        raise work.damaged(f"{DISTILLED} is missing")
    return done


def _round_input(_: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return fake_quantize(inputs[0], dtype), *inputs[1:]


def _samples(count: int, first: int, wanted: int) -> list[int]:
    """Return the next ``wanted`` of ``count`` samples after ``first`` ones; each epoch uses all of them once."""
    places = range(first, first + wanted)
    return [_epoch_order(count, place // count)[place % count] for place in places]


@lru_cache(2)
def _epoch_order(count: int, epoch: int) -> Sequence[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order
