"""A quantised norm → npu_add_rms_norm_quant, npu_add_rms_norm_dynamic_quant, npu_rms_norm_quant."""

from __future__ import annotations

import torch
from torch import fx

from ...patterns import values
from ...patterns.match import Match
from ...patterns.movement import COPIES
from ...patterns.norm_quant import NormQuant
from ...patterns.quantiser import Dynamic, Static
from ...patterns.rms_norm import RmsNorm
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ...runtime.ops.quantize import INT8_MAX
from ...runtime.sizes import static_int
from ..edit import Edit, Refused
from .precision import refuse_other_precision
from .rms_norm import gamma, note_statistics, refuse_rounded_sum, vector

aten = torch.ops.aten


def lower(match: Match, edit: Edit) -> OpContract:
    """One op for the norm, the residual add before it, and the quantiser behind it."""
    p = match.params
    assert isinstance(p, NormQuant)
    check_norm(p.norm)
    if p.norm.dtype not in (torch.float16, torch.bfloat16):
        raise Refused(f"its norm is in {p.norm.dtype}; the ops that quantise take torch.float16 and torch.bfloat16")
    _refuse_escapes(match)
    if any(dtype == torch.float64 for dtype in p.quantiser.steps):
        raise Refused("the model quantises in torch.float64, the op in torch.float32")
    if isinstance(p.quantiser, Static):
        return _lower_static(match, p.norm, p.quantiser, p.residual, edit)
    return _lower_dynamic(match, p.norm, p.quantiser, p.residual, edit)


def check_norm(norm: RmsNorm) -> None:
    """Refuses a norm that is more than x * rstd * weight."""
    if norm.is_composite or norm.groups != 1:
        raise Refused("its norm has a bias, a gate, groups or a scale before it, which the op does not have")
    if norm.offset:
        raise Refused(f"{norm.offset:g} is added to the weight, which the op does not do")


def summands(match: Match, norm: RmsNorm, edit: Edit) -> tuple[fx.Node, fx.Node]:
    """x1 and x2 of the residual sum, as the op takes them: in the shape of the norm."""
    total, x = match.inputs["sum"], match.inputs["x"]
    if total is not edit.current(total):
        raise Refused("the add has been taken by another fusion")
    refuse_rounded_sum(match)
    check_dtype(norm, total)
    note_statistics(norm, edit)
    x1, x2 = (edit.contiguous(edit.current(match.inputs[name])) for name in ("x1", "x2"))
    if not values.same_shape(values.shape(total), values.shape(x)):
        x1, x2 = (edit.view(summand, edit.known_sizes(x)) for summand in (x1, x2))
    return x1, x2


def replace_sum(match: Match, new: fx.Node, edit: Edit) -> None:
    """Lets a result of the op stand for the residual sum."""
    total = match.inputs["sum"]
    if not values.same_shape(values.shape(total), values.shape(new)):
        new = edit.view(new, edit.sizes(edit.current(match.inputs["x1"])))
    edit.replace(total, new)


def check_dtype(norm: RmsNorm, x: fx.Node) -> None:
    """Refuses a norm whose result is not of x's type, or that rounds on the way to it."""
    refuse_other_precision(norm.dtype, *norm.steps)
    if norm.dtype != values.dtype(x):
        raise Refused(f"the norm's result is {norm.dtype} for an x of {values.dtype(x)}; the op wants one type")


def _refuse_escapes(match: Match) -> None:
    """Refuses where more is used than the op gives: the int8 values, the scales of rows, and the sum."""
    given = {match.node, match.inputs.get("row_scale")}
    y = match.inputs["y"]
    own = {*match.claimed}
    for node in (node for node in match.claimed if node >= y and node not in given):
        if node.users.keys() - own - given:
            what = "the norm's result" if node is y else f"{node.target}, a step of the quantiser,"
            raise Refused(f"{what} is used elsewhere too; the op gives the quantised one only")


def _lower_static(match: Match, norm: RmsNorm, quantiser: Static, residual: bool, edit: Edit) -> OpContract:
    if quantiser.limits != (-INT8_MAX - 1, INT8_MAX):
        low, high = quantiser.limits
        raise Refused(f"the model clamps to {low:g} to {high:g}, the op to -128 to 127")
    zero_point = match.inputs.get("zero_point")
    if not quantiser.rounds_last:
        whole = quantiser.zero_point is not None and quantiser.zero_point.is_integer()
        if not whole and (zero_point is None or values.is_float(zero_point)):
            raise Refused("the model adds a zero point after it has rounded, which is not known to be an integer")
        edit.note("the op rounds after it has added the zero point; the model rounds before")
    _note_steps(quantiser, edit)
    return (_static_add if residual else _static_alone)(match, norm, quantiser, edit)


def _static_add(match: Match, norm: RmsNorm, quantiser: Static, edit: Edit) -> OpContract:
    contract = CONTRACTS["npu::npu_add_rms_norm_quant"]
    x1, x2 = summands(match, norm, edit)
    dtype = norm.dtype
    if dtype == torch.bfloat16:
        edit.note(f"the op quantises the norm before it is rounded to {dtype}, from the sum before it is")
    elif norm.weight and norm.normed_dtype != dtype:
        edit.note(f"the op rounds the normed x to {dtype} before the weight; the model does not")
    scale_dtype, zero_dtype = (
        (torch.float32, torch.int32) if dtype == torch.float16 else (torch.bfloat16, torch.bfloat16)
    )
    scale = _scale(match, quantiser, x1, scale_dtype, norm.hidden_size, edit)
    zero_point = _zero_point(match, quantiser, x1, zero_dtype, norm.hidden_size, edit)
    added = edit.op(
        contract,
        x1=x1,
        x2=x2,
        gamma=gamma(match, x1, edit),
        scales1=_spread(scale, norm.hidden_size, edit),
        zero_points1=None if zero_point is None else _spread(zero_point, norm.hidden_size, edit),
        epsilon=norm.eps,
        div_mode=quantiser.divides,
    )
    replace_sum(match, edit.item(added, 2), edit)
    edit.replace(match.node, _viewed(match, edit.item(added, 0), edit))
    return contract


def _static_alone(match: Match, norm: RmsNorm, quantiser: Static, edit: Edit) -> OpContract:
    contract = CONTRACTS["npu::npu_rms_norm_quant"]
    x = edit.current(match.inputs["x"])
    check_dtype(norm, x)
    note_statistics(norm, edit)
    if not quantiser.divides:
        raise Refused(f"the model multiplies by its scale; {contract.name} divides")
    scale = _scale(match, quantiser, x, norm.dtype, 1, edit)
    zero_point = _zero_point(match, quantiser, x, torch.int8, 1, edit)
    edit.note(
        f"the op quantises the norm before it is rounded to {norm.dtype}, multiplies by the inverse of the scale, and"
        " rounds to torch.float16 before int8"
    )
    quantised = edit.op(
        contract,
        x=x,
        gamma=gamma(match, x, edit),
        beta=edit.filled(0.0, norm.hidden_size, norm.dtype, x),
        scale=scale,
        offset=edit.filled(0, 1, torch.int8, x) if zero_point is None else zero_point,
        epsilon=norm.eps,
    )
    edit.replace(match.node, _viewed(match, quantised, edit))
    return contract


def _lower_dynamic(match: Match, norm: RmsNorm, quantiser: Dynamic, residual: bool, edit: Edit) -> OpContract:
    contract = CONTRACTS["npu::npu_add_rms_norm_dynamic_quant"]
    if not residual:
        raise Refused(f"there is no residual add before the norm, which {contract.name} begins with")
    if quantiser.floor is not None:
        raise Refused(f"the model keeps the scale of a row above {quantiser.floor:g}; the op does not")
    if not quantiser.clamps and any(dtype.itemsize < 4 for dtype in quantiser.steps):
        raise Refused("the model does not clamp what it rounds in 16 bits to 127, and wraps round where that is 128")
    x1, x2 = summands(match, norm, edit)
    edit.note(f"the op quantises the norm before it is rounded to {norm.dtype}, from the sum before it is")
    _note_steps(quantiser, edit)
    smooth = match.inputs.get("smooth")
    results = edit.op(
        contract,
        x1=x1,
        x2=x2,
        gamma=gamma(match, x1, edit),
        smooth_scale1=None if smooth is None else vector(edit.current(smooth), edit),
        epsilon=norm.eps,
        output_mask=[True, False],
    )
    replace_sum(match, edit.item(results, 2), edit)
    edit.replace(match.node, _viewed(match, edit.item(results, 0), edit))
    row_scale = match.inputs.get("row_scale")
    if row_scale is not None and row_scale.users.keys() - {*match.claimed}:
        edit.replace(row_scale, _row_scale(edit.item(results, 3), row_scale, edit))
    return contract


def _note_steps(quantiser: Static | Dynamic, edit: Edit) -> None:
    if isinstance(quantiser, Dynamic):
        edit.note("the op multiplies a row by 127 / max, the inverse of its scale; the model may divide by the scale")
    coarse = [dtype for dtype in quantiser.steps if dtype.itemsize < 4]
    if coarse:
        edit.note(f"the model quantises in {', '.join(sorted(map(str, coarse)))}, the op in torch.float32")


# What the quantiser is given ---------------------------------------------------------------------------------------


def _scale(match: Match, quantiser: Static, x: fx.Node, dtype: torch.dtype, size: int, edit: Edit) -> fx.Node:
    """The scale as [size], or [1] where it is a tensor of one element; of a type that holds all its values."""
    if quantiser.scale is not None:
        wanted = torch.tensor(quantiser.scale, dtype=torch.float32)
        if wanted.to(dtype).float() != wanted:
            raise Refused(f"the scale {quantiser.scale:g} is no {dtype}, in which the op takes it")
        return edit.filled(quantiser.scale, size, dtype, x)
    scale = edit.current(match.inputs["scale"])
    if not values.is_widening(values.dtype(scale), dtype):
        raise Refused(f"the scale is {values.dtype(scale)}; for an x of {values.dtype(x)} the op takes {dtype}")
    return edit.cast(_in_one_dim(scale, edit), dtype)


def _zero_point(
    match: Match, quantiser: Static, x: fx.Node, dtype: torch.dtype, size: int, edit: Edit
) -> fx.Node | None:
    """The zero point as `_scale` gives the scale; None where there is none."""
    number = quantiser.zero_point
    if number is not None:
        if not (number.is_integer() and -INT8_MAX - 1 <= number <= INT8_MAX):
            raise Refused(f"the zero point {number:g} is no int8")
        return edit.filled(number, size, dtype, x)
    if "zero_point" not in match.inputs:
        return None
    zero_point = edit.current(match.inputs["zero_point"])
    given = values.dtype(zero_point)
    if given not in (dtype, torch.int8):
        raise Refused(f"the zero point is {given}; for an x of {values.dtype(x)} the op takes {dtype} or torch.int8")
    return edit.cast(_in_one_dim(zero_point, edit), dtype)


def _in_one_dim(given: fx.Node, edit: Edit) -> fx.Node:
    return given if len(values.shape(given)) == 1 else edit.view(given, [-1])


def _spread(given: fx.Node, size: int, edit: Edit) -> fx.Node:
    """What is given once, for each channel: the op broadcasts nothing."""
    if values.last_dim(given) == size:
        return given
    return edit.share(("spread", given, size), lambda: edit.contiguous(edit.call(aten.expand.default, given, [size])))


# Results -----------------------------------------------------------------------------------------------------------


def _viewed(match: Match, result: fx.Node, edit: Edit) -> fx.Node:
    """The result through the views that the model had between the norm and its quantiser."""
    views = []
    node = match.inputs["rows"]
    while node is not match.inputs["y"]:
        views += [node] if node.target not in COPIES else []
        node = node.all_input_nodes[0]
    for view in reversed(views):
        result = edit.call(view.target, result, *view.args[1:], **view.kwargs)  # type: ignore[arg-type]  # an op
    return result


def _row_scale(scale: fx.Node, wanted: fx.Node, edit: Edit) -> fx.Node:
    """The scales of rows in the type and shape that the model had them in."""
    shape = values.shape(wanted)
    if values.dtype(wanted) != torch.float32:
        edit.note(f"the model rounds the scale of a row to {values.dtype(wanted)} before it quantises by it")
    if values.same_shape(shape, (*values.shape(scale), 1)):
        scale = edit.call(aten.unsqueeze.default, scale, -1)
    elif not values.same_shape(shape, values.shape(scale)):
        sizes = [static_int(size) for size in shape]
        if sizes.count(None) > 1:
            raise Refused(f"the scales of rows have shape {tuple(shape)}, with more than one symbol")
        scale = edit.view(scale, [-1 if size is None else size for size in sizes])
    return edit.cast(scale, values.dtype(wanted))
