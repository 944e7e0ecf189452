"""Several projections of one x as one matmul."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from ...patterns import values
from ...patterns.linear import Linear, linear
from ...runtime.shards import is_part
from ...runtime.sizes import is_contiguous
from ...runtime.weights import can_pack, pack, transposed, was_moved
from ..edit import Edit, Refused

aten = torch.ops.aten


def projections(nodes: Sequence[fx.Node]) -> list[Linear] | None:
    """The nodes as projections of one x, or None."""
    found = [linear(node) for node in nodes]
    whole = [projection for projection in found if projection is not None]
    return whole if len(whole) == len(found) and len({p.x for p in whole}) == 1 else None


def packed_projection(parts: Sequence[Linear], edit: Edit) -> fx.Node:
    """One projection whose columns are those of `parts` in order.

    Raises:
        Refused: the weights are no parameters, or only some have a bias.
    """
    if not edit.rewriter.pack_weights:
        raise Refused("its projections are separate and Options.pack_weights is off")
    arguments = [edit.current(parts[0].x), _packed([p.weight for p in parts], edit)]
    biases = [p.bias for p in parts if p.bias is not None]
    if biases:
        if len(biases) != len(parts):
            raise Refused("some of its projections have a bias and some have none")
        arguments.append(_packed(biases, edit))
    return edit.call(aten.linear.default, *arguments)


def taps_first(weight: fx.Node, edit: Edit) -> fx.Node:
    """The weight of a depthwise convolution, [channels, 1, width] or [channels, width], as [width, channels].

    Raises:
        Refused: the weight is no parameter, can't be moved, or is read elsewhere too, as it lies now.
    """
    if not edit.rewriter.pack_weights:
        raise Refused("its weight has the taps last and Options.pack_weights is off")
    for reader in _readers(weight):
        if not (edit.is_claimed(reader) or _takes_any_strides(reader)):
            raise Refused(f"its weight is read elsewhere too, by {reader.target}, and would have other strides there")
    _claim([weight], transposed, "the convolution", edit)
    return edit.share((transposed, weight), lambda: edit.call(transposed, weight))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node or a view of it."""
    for user in node.users:
        if user.target in _VIEWS:
            yield from _readers(user)
        else:
            yield user


# Of any strides, unlike `view`.
_VIEWS = frozenset(
    {
        *(aten.select.int, aten.slice.Tensor, aten.t.default, aten.transpose.int, aten.permute.default),
        *(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default, aten.alias.default),
    }
)


def _takes_any_strides(node: fx.Node) -> bool:
    """Whether what a node gives, and how it lies, doesn't depend on how what it reads lies."""
    if node.target is aten.clone.default:
        return node.kwargs.get("memory_format") is torch.contiguous_format
    return node.op == "output" or node.target in (transposed, aten.convolution.default)


def _packed(weights: Sequence[fx.Node], edit: Edit) -> fx.Node:
    for weight in weights:
        value = values.tensor(weight)
        assert value is not None
        if not is_contiguous(value):
            raise Refused(f"a weight of its projections is not contiguous: strides {tuple(value.stride())}")
    _claim(weights, pack, "its projections", edit)
    return edit.call(pack, list(weights), shaped_as=torch.cat)


def _claim(weights: Sequence[fx.Node], form: Callable[..., torch.Tensor], owner: str, edit: Edit) -> None:
    """Settles that weights lie in one form: each can have one only."""
    parameters = edit.rewriter.parameters
    if any(map(is_part, weights)):
        raise Refused(
            f"a weight of {owner} is a DTensor, and torch can't compile for two DTensors again once their local tensors"
            " lie in one storage; plain parameters of a rank's own rows, or one weight for all, can be fused"
        )
    if any(weight not in parameters for weight in weights):
        raise Refused(f"a weight of {owner} is computed or passed in, not a parameter of the model")
    claim = (form, tuple(weights))
    if any(edit.rewriter.packed.get(weight, claim) != claim for weight in weights):
        raise Refused(f"a weight of {owner} is packed with others already")
    values = [parameters[weight] for weight in weights]
    if not (was_moved(values, form) or can_pack(values)):
        raise Refused(f"the weights of {owner} share their storage with something else, and can't be moved")
    edit.rewriter.packed.update(dict.fromkeys(weights, claim))
