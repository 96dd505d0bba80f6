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
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slidesparse.calibrate.changes import ChangedReader, Changes, add_change, changed
from slidesparse.calibrate.model import Ends, Model
from slidesparse.calibrate.roles import (
    Pair,
    Roles,
    find_readers,
    fold,
    random_rotation,
    roles_of,
    rotations,
    same,
    unit_of,
)
from slidesparse.checkpoint.names import WEIGHT
from slidesparse.checkpoint.skeleton import TIED, Skeleton
from slidesparse.checkpoint.storage import MODULES, Checkpoint, Reader, is_embedding_model

TOKENS = 16  # that both ends of the model are tried on
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
    if model.skeleton.is_multimodal:
        return "other modules than the embedding feed its residual stream"
    # Such as blocks that predict further tokens, which vLLM alone runs
    unread = {*model.skeleton.checkpoint.tensors} - {*model.skeleton.tensors("")}
    unread = {name for name in unread if model.hidden in model.checkpoint.require(name).shape}
    if unread:
        return f"transformers does not read {min(unread)}, which may read the residual stream"
    for number, roles in enumerate(roles_of(model, reader)):
        if roles.residual is None:
            return f"block {number} ({type(model.skeleton.blocks[number]).__name__}) does not commute with rotations"
    return (
        None
        if _EndsRoles.find(model, reader)
        else "its embedding or its head does not commute with rotations"
    )


def untie_head(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with an untied lm_head, initially a copy of the embedding if it was tied.

    A model is returned unchanged if its kind is tied by default, as vLLM may then know no other, or has no head.
    """
    skeleton = Skeleton(checkpoint)
    head, embedding = skeleton.model.get_output_embeddings(), skeleton.model.get_input_embeddings()
    if head is None or getattr(type(skeleton.config)(), TIED, False):
        return checkpoint
    paths = {id(module): name + WEIGHT for name, module in skeleton.model.named_modules()}
    tensors = dict(checkpoint.tensors)
    if skeleton.config.tie_word_embeddings or paths[id(head)] not in skeleton.stored:
        stored = tensors[
            checkpoint.require(skeleton.stored.get(paths[id(embedding)], paths[id(embedding)])).name
        ]
        name = skeleton.stored.get(paths[id(head)], paths[id(head)])
        tensors[name] = stored._replace(spec=stored.spec._replace(name=name))
    return replace(checkpoint, tensors=tensors, config={**checkpoint.config, TIED: False})


@dataclass(frozen=True)
class _EndsRoles:
    """The parameters outside of blocks that rotation changes."""

    embedding: str
    norm: str
    head: str
    unit: float  # the weight of the norm without effect

    @classmethod
    def find(cls, model: Model, reader: Reader) -> _EndsRoles | None:
        """Return them, or None if they do not commute with a rotation."""
        with torch.inference_mode(False), torch.no_grad():
            ends = model.ends(reader)
            roles = cls._guess(model, ends)
            if roles is None:
                return None
            q = random_rotation(model.hidden, model.device)
            weights = changed(ends.weights, roles.changes(ends.weights, q))
            rotated, ids = Ends(model, weights), torch.arange(TOKENS)[None] % model.vocabulary
            x, turned = ends.embed(ids), rotated.embed(ids)
            commutes = same(turned, x @ q.float()) and same(rotated.logits(turned), ends.logits(x))
            return roles if commutes else None

    @classmethod
    def _guess(cls, model: Model, ends: Ends) -> _EndsRoles | None:
        """Return the norm whose output the head reads, with embedding and head."""
        network, inside = model.skeleton.model, model.skeleton.list_path + "."
        paths = {id(module): name for name, module in network.named_modules()}
        head, embedding = (
            paths[id(module)] for module in (network.get_output_embeddings(), network.get_input_embeddings())
        )
        candidates = {
            name: module
            for name, module in network.named_modules()
            if [tuple(p.shape) for p in module.parameters()] == [(model.hidden,)]
            and not name.startswith(inside)
        }
        x = torch.randn(1, TOKENS, model.hidden, device=model.device)
        norms = find_readers(candidates, network, [head], lambda: ends.logits(x))
        norm = next(iter(norms), None)
        unit = unit_of(candidates[norm], model) if norm else None
        if norm is None or unit is None:
            return None
        return cls(embedding + WEIGHT, norm + WEIGHT, head + WEIGHT, unit)

    def changes(self, weights: Mapping[str, Tensor], q: Tensor | None) -> Changes:
        """Return the changes of these parameters, on float64; ``weights`` must hold the norm's."""
        changes: Changes = {}
        gain = weights[self.norm].double() + (1 - self.unit)
        add_change(changes, self.norm, lambda w, _: torch.full_like(w, self.unit))
        add_change(changes, self.head, partial(fold, gain, q))
        if q is not None:
            add_change(changes, self.embedding, lambda w, _: w @ q)
        return changes


def rotated_reader(
    reader: Reader, model: Model, roles: list[Roles], rotation: Rotation | None = None
) -> ChangedReader:
    """Return a reader of a model with its norm weights folded, and with ``rotation`` also rotated.

    Changed tensors are computed in float64 on the model's device and returned as float32, whatever their dtype.
    """
    skeleton, device = model.skeleton, model.device
    q = rotation[Q].to(device) if rotation else None
    ends = _EndsRoles.find(model, reader)
    assert ends
    norm = reader.whole(skeleton.stored[ends.norm]).to(device)
    changes = {skeleton.stored[name]: c for name, c in ends.changes({ends.norm: norm}, q).items()}
    for number, block_roles in enumerate(roles):
        residual, prefix = block_roles.residual, skeleton.prefix(number)
        assert residual
        stored = {
            parameter.removeprefix(prefix): name
            for parameter, name in skeleton.stored.items()
            if parameter.startswith(prefix)
        }
        weights = {
            name: reader.whole(stored[name]).to(device) for name in (n + WEIGHT for n in residual.norms)
        }
        r = rotation[str(number)].to(device) if rotation and str(number) in rotation else None
        pair = value_pair(block_roles) if r is not None else None
        names = dict.fromkeys(stored, torch.empty(0)) | weights
        of_block = rotations(residual, names, q, pair, r)
        changes |= {stored[name]: change for name, change in of_block.items()}
    return ChangedReader(reader, changes, torch.float64, device)
