"""Rotate a decoder's residual stream, and the values of each head, without changing the model's outputs.

RMSNorm without a weight commutes with any orthogonal Q.  So norm weights are first folded into the linear layers that
follow, and then all weights that read the residual stream x, or add to it, are rotated::

    x' = x Q          embed' = embed Q
    reads x           W' = (W * norm) Q                  q, k, v, gate, up, lm_head
    adds to x         W' = Q^T W,  b' = Q^T b            o, down
    values of a head  W_v' = R^T W_v,  b_v' = R^T b_v,  W_o' = W_o R         one R for each key-value head

The result is an ordinary checkpoint of the same architecture, with an untied lm_head.  Which layers do what, and
whether all of this leaves the outputs as they are, is found by running blocks and both ends of the model (see
`slidesparse.calibrate.roles`).  `slidesparse.calibrate.learning` finds Q and R that minimize the loss of pruning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from slidesparse.calibrate.changes import ChangedReader, Changes, changed
from slidesparse.calibrate.model import Ends, Model
from slidesparse.calibrate.roles import (
    Pair,
    Residual,
    Roles,
    find_norms,
    hadamard,
    roles_of,
    rotations,
    same,
)
from slidesparse.checkpoint.names import WEIGHT
from slidesparse.checkpoint.skeleton import TIED, Skeleton
from slidesparse.checkpoint.storage import MODULES, TEXT_CONFIG, Checkpoint, Reader, is_embedding_model

TOKENS = 16  # that both ends of the model are tried on
ENDS = "ends"  # of a model, beside the structures of its blocks
Q = "q"
# Orthogonal matrices in float64: Q [hidden, hidden], and by the number of a block whose values are rotated, R
# [kv_heads, width, width]
Rotation = Mapping[str, Tensor]


def value_pair(roles: Roles) -> Pair | None:
    """Return the layers of a block whose heads can be rotated: v, which is not fused with others, and o."""
    pairs = (pair for pair in roles.pairs if pair.is_attention and pair.first == 0 and pair.copies == 1)
    return next(pairs, None)


def rotation_obstacle(model: Model, reader: Reader) -> str | None:
    """Return why a model cannot be rotated, or None.  ``model`` is that of `untie_head`."""
    if not model.skeleton.generates:
        return "it does not predict tokens, so its hidden states may be used"
    if is_embedding_model(model.checkpoint.folder):
        return f"{MODULES} marks this as an embedding model, whose embeddings rotation would change"
    if model.skeleton.is_tied:
        return "models of its kind tie lm_head to the embedding; --layer lm_head=dense unties it"
    if model.skeleton.text_config is not model.skeleton.config:  # multimodal
        return "other modules than the embedding feed its residual stream"
    # Such as blocks that predict further tokens, which vLLM alone runs
    unread = {*model.skeleton.checkpoint.tensors} - {*model.skeleton.tensors("")}
    unread = {name for name in unread if model.hidden in model.checkpoint.require(name).shape}
    if unread:
        return f"transformers does not read {min(unread)}, which may read the residual stream"
    for number, roles in enumerate(roles_of(model, reader)):
        if roles.residual is None:
            return f"block {number} ({type(model.skeleton.blocks[number]).__name__}) does not commute with rotations"
    return None if _find_ends(model, reader) else "its embedding or its head does not commute with rotations"


def untie_head(checkpoint: Checkpoint, asked: bool = False) -> Checkpoint:
    """Return the checkpoint with an untied lm_head, initially a copy of the embedding if it was tied.

    A model without a head is returned unchanged, and so is one whose kind is tied by default, as vLLM may then know no
    other, unless that is ``asked`` for.
    """
    skeleton = Skeleton(checkpoint)
    head = skeleton.model.get_output_embeddings()
    if head is None or (not asked and getattr(type(skeleton.config)(), TIED, False)):
        return checkpoint
    embedding = skeleton.model.get_input_embeddings()
    paths = {id(module): name + WEIGHT for name, module in skeleton.model.named_modules()}
    tensors = dict(checkpoint.tensors)
    if skeleton.is_tied or paths[id(head)] not in skeleton.stored:
        stored = tensors[checkpoint.require(skeleton.name_of(paths[id(embedding)])).name]
        name = skeleton.name_of(paths[id(head)])
        tensors[name] = stored._replace(spec=stored.spec._replace(name=name))
    config = {**checkpoint.config, TIED: False}
    if isinstance(text := config.get(TEXT_CONFIG), dict):  # where some classes of vLLM read it
        config[TEXT_CONFIG] = {**text, TIED: False}
    return replace(checkpoint, tensors=tensors, config=config)


def _find_ends(model: Model, reader: Reader) -> Residual | None:
    """Return how the ends of a model use the residual stream, or None if they do not commute; found once."""
    known: dict[str, Residual | None] = model.roles
    if ENDS not in known:
        known[ENDS] = _try_ends(model, reader)
    return known[ENDS]


def _try_ends(model: Model, reader: Reader) -> Residual | None:
    network = model.skeleton.model
    paths = {id(module): name for name, module in network.named_modules()}
    head, embedding = (
        paths[id(module)] for module in (network.get_output_embeddings(), network.get_input_embeddings())
    )
    with torch.inference_mode(False), torch.no_grad():
        ends, x = model.ends(reader), torch.randn(1, TOKENS, model.hidden, device=model.device)
        residual = find_norms(model, network, [head], lambda: ends.logits(x))
        if residual is None:
            return None
        residual, q = replace(residual, embedding=embedding), hadamard(model.hidden, model.device)
        rotated = Ends(model, changed(ends.weights, rotations(residual, ends.weights, q)))
        ids = torch.arange(TOKENS)[None] % model.vocabulary
        x, turned = ends.embed(ids), rotated.embed(ids)
        commutes = same(turned, x @ q.float()) and same(rotated.logits(turned), ends.logits(x))
        return residual if commutes else None


def rotated_reader(
    reader: Reader, model: Model, roles: list[Roles], rotation: Rotation | None = None
) -> ChangedReader:
    """Return a reader of a model with its norm weights folded, and with ``rotation`` also rotated.

    Changed tensors are computed in float64 on the model's device and returned as float32, whatever their dtype.
    """
    skeleton, device = model.skeleton, model.device
    q = rotation[Q].to(device) if rotation else None
    changes: Changes = {}
    blocks = [(model.skeleton.prefix(number), of_block.residual) for number, of_block in enumerate(roles)]
    for number, (prefix, residual) in enumerate([*blocks, ("", _find_ends(model, reader))]):
        assert residual
        stored = {
            parameter.removeprefix(prefix): name
            for parameter, name in skeleton.stored.items()
            if parameter.startswith(prefix)
        }
        weights = dict.fromkeys(stored, torch.empty(0))
        for name in (norm + WEIGHT for norm in residual.norms):
            weights[name] = reader.whole(stored[name]).to(device)
        r = rotation[str(number)].to(device) if rotation and str(number) in rotation else None
        pair = value_pair(roles[number]) if r is not None else None
        of_part = rotations(residual, weights, q, pair, r)
        changes |= {stored[name]: change for name, change in of_part.items()}
    return ChangedReader(reader, changes, torch.float64, device)
