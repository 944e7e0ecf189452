"""RMSNorm → npu_rms_norm, npu_gemma_rms_norm; residual add and RMSNorm → npu_add_rms_norm."""

from __future__ import annotations

import torch
from torch import fx

from ...patterns import values
from ...patterns.add_rms_norm import AddRmsNorm
from ...patterns.match import Match
from ...patterns.movement import trace
from ...patterns.rms_norm import RmsNorm
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ..edit import Edit, Refused
from ..layout import inverse, row_order
from .precision import refuse_other_precision
from .steps import note_order_of_norm


def lower(match: Match, edit: Edit) -> OpContract:
    """One op for a norm: the Gemma form where 1 is added to the weight, the plain one otherwise."""
    p = match.params
    assert isinstance(p, RmsNorm)
    if p.is_composite:
        (norm,) = match.parts  # no op takes a bias, a scale before or a gate: they stay as they are
        return lower(norm, edit)
    if p.groups != 1:
        raise Refused(f"it norms {p.groups} groups of the last axis, each on its own; the op norms the whole axis")
    x = edit.current(match.inputs["x"])
    _check_dtype(p, x)
    order = row_order(x)
    x = edit.permuted(x, order)
    if p.offset == 1:
        contract = CONTRACTS["npu::npu_gemma_rms_norm"]
        x = edit.contiguous(x)
        if p.dtype.itemsize < 4 and p.normed_dtype == p.dtype:
            edit.note(f"the model rounds the normed x to {p.dtype} before the weight; the op does not")
    elif p.offset == 0:
        contract = CONTRACTS["npu::npu_rms_norm"]
        if p.weight and p.dtype.itemsize < 4 and p.normed_dtype != p.dtype:
            edit.note(f"the op rounds the normed x to {p.dtype} before the weight; the model does not")
    else:
        raise Refused(f"{p.offset:g} is added to the weight; there are ops for 0 and 1")
    note_statistics(p, edit)
    normed = edit.op(contract, input=x, gamma=gamma(match, x, edit), epsilon=p.eps)
    edit.replace(match.node, edit.permuted(edit.item(normed, 0), inverse(order)))
    return contract


def lower_add(match: Match, edit: Edit) -> OpContract:
    """One op for the residual add and the norm behind it."""
    assert isinstance(match.params, AddRmsNorm)
    p = match.params.norm
    contract = CONTRACTS["npu::npu_add_rms_norm"]
    if p.offset:
        raise Refused(f"{p.offset:g} is added to the weight, which {contract.name} does not do")
    total = match.inputs["sum"]
    if total is not edit.current(total):
        raise Refused("the add has been taken by another fusion")
    if p.is_composite or p.groups != 1:
        raise Refused("its norm has a bias, a gate, groups or a scale before it")
    x1, x2 = (edit.current(match.inputs[name]) for name in ("x1", "x2"))
    refuse_rounded_sum(match)
    rounded = _roundings(match, p, (x1, x2))
    if rounded is None:
        _check_dtype(p, total)
        rounded = [total]
        if p.dtype.itemsize < 4:
            edit.note(f"the op takes the statistics from the sum before it is rounded to {p.dtype}")
    else:
        refuse_other_precision(p.dtype, *p.steps)
        x1, x2 = map(values.strip_widening, (x1, x2))
        if p.dtype == torch.float16:
            edit.note("the op rounds the sum to torch.float16 before it norms it; the model does not")
    if p.dtype.itemsize < 4 and p.weight and p.normed_dtype != p.dtype:
        edit.note(f"the op rounds the normed x to {p.dtype} before the weight; the model does not")
    note_statistics(p, edit)
    x1, x2 = edit.contiguous(x1), edit.contiguous(x2)
    is_viewed = not values.same_shape(values.shape(total), values.shape(match.node))
    if is_viewed:
        shape = edit.sizes(x1)
        x1, x2 = (edit.view(x, edit.known_sizes(match.node)) for x in (x1, x2))
    added = edit.op(contract, x1=x1, x2=x2, gamma=gamma(match, x1, edit), epsilon=p.eps)
    new_total = edit.item(added, 2)
    for node in rounded:
        edit.replace(node, edit.view(new_total, shape) if is_viewed else new_total)
    edit.replace(match.node, edit.item(added, 0))
    return contract


def _roundings(match: Match, p: RmsNorm, addends: tuple[fx.Node, fx.Node]) -> list[fx.Node] | None:
    """What a sum is rounded to, where it is added, normed and never used in float32; None where it is not.

    So SGLang's own norm adds: both addends have the type of the result, and are widened for the sum.

    Raises:
        Refused: the sum itself is used elsewhere.
    """
    total = match.inputs["sum"]
    if values.dtype(total) != torch.float32 or p.dtype.itemsize > 2:
        return None
    if any(values.dtype(values.strip_widening(x)) != p.dtype for x in addends):
        return None
    others = [user for user in total.users if user not in match.claimed]
    if not all(values.is_float_cast(user) and values.dtype(user) == p.dtype for user in others):
        raise Refused(f"its sum is used in torch.float32 as well; the op gives it in {p.dtype}")
    return others


def refuse_rounded_sum(match: Match) -> None:
    """Refuses a sum that the norm reads in another type, or that has been in a narrower one on the way there."""
    x, total = match.inputs["x"], match.inputs["sum"]
    _, path = trace(x, lambda node: node is not total)
    narrower = [dtype for dtype in map(values.dtype, path) if not values.is_widening(values.dtype(total), dtype)]
    read_in = next(iter(narrower), values.dtype(x))
    if read_in != values.dtype(total):
        raise Refused(f"the sum is rounded to {read_in} before the norm; the op norms it as it is")


def _check_dtype(p: RmsNorm, x: fx.Node) -> None:
    refuse_other_precision(p.dtype, *p.steps)
    if p.dtype != values.dtype(x):
        raise Refused(f"its result is {p.dtype} for an x of {values.dtype(x)}; the op gives the type of x")


def note_statistics(p: RmsNorm, edit: Edit) -> None:
    """Notes where the model takes its statistics more coarsely than an op, which takes them in float32, or in steps."""
    coarsest = min(p.statistics_dtype, p.scale_dtype, key=lambda dtype: dtype.itemsize)
    if coarsest.itemsize < 4:
        edit.note(f"the model takes its statistics in {coarsest}, the op in float32")
    else:
        note_order_of_norm(p.spelling, edit)


def gamma(match: Match, x: fx.Node, edit: Edit) -> fx.Node:
    """The weight as [hidden_size]; ones where the norm has none."""
    weight = match.inputs.get("weight")
    if weight is not None:
        return vector(edit.current(weight), edit)
    size = values.last_dim(x)
    assert size is not None
    return edit.filled(1.0, size, values.dtype(x), like=x)


def vector(weight: fx.Node, edit: Edit) -> fx.Node:
    """A weight of shape [1, …, n] as [n]."""
    shape = values.shape(weight)
    return weight if len(shape) == 1 else edit.view(weight, [-1])
