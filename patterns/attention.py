"""Attention, however it is spelled:

    out = softmax(scale * q k^T, with hidden keys at -inf) v

as one call of `scaled_dot_product_attention` or written out, with keys and values whose heads are repeated or not. What
else is done to the scores (a bias, soft-capping, sinks) is recognised as such.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from ..runtime.sizes import Size, known_equal, static_int
from . import values
from .canonical import Canonicaliser
from .cone import walk
from .fusion_attention import is_fusion_attention, read
from .linear import is_matmul
from .mask import CAUSAL_FLAG, NO_MASK, Mask
from .match import Findings, Match, Miss
from .movement import COPIES, source
from .preserved import original
from .scores import Addition, Operand, Scores, changes_no_value, is_last, operand, scores
from .spelling import Spelling, spell

aten = torch.ops.aten

KIND = "attention"


@dataclass(frozen=True, slots=True)
class Attention:
    """What a site of attention fixes.

    Its inputs are query, key and value, [batch, heads, tokens, head_dim] or, with one head, [batch, tokens, head_dim];
    and mask, bias and sink where there are such.

    Args:
        num_heads: heads of query.
        num_kv_heads: heads of key and value, before any repetition; divides num_heads.
        scale: factor of the scores.
        mask: what hides keys.
        hides: whether True hides a key, in a bool mask.
        blank_rows: what the model gives a query that sees no key: zeros, NaN, or the mean of all values.
        traits: what else is done, such as "soft-capping".
        key_transposed: whether the last two axes of the input key are the other way round.
        merged: whether batch and heads are one axis of the result.
        is_written_out: whether it is spelled by matmuls and a softmax.
        steps: all types that something is computed in or rounded to.
        spelling: how the result is computed from the inputs, bit for bit.
    """

    num_heads: int
    num_kv_heads: int
    scale: float
    mask: Mask
    hides: bool
    blank_rows: Literal["zeros", "NaN", "mean"]
    traits: tuple[str, ...]
    key_transposed: bool
    merged: bool
    is_written_out: bool
    steps: frozenset[torch.dtype]
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        return {
            "mask": self.mask.kind,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "scale": self.scale,
            "traits": self.traits,
            "spelling": str(self.spelling),
        }


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Finds attention whose result is `node`."""
    call = called(node)
    if call is not None:
        return _called(node, call, c)
    if is_fusion_attention(node):
        return _fused(node, c)
    if node.target in WHOLE_LAYERS:
        return Miss(KIND, node, _WHOLE_LAYER, (str(node.target),), matched=3)
    if is_matmul(node) and values.is_float(node):
        return _written_out(node, c)
    return None


# What torch's own layers call where they can.
WHOLE_LAYERS = frozenset({aten._transformer_encoder_layer_fwd.default, aten._native_multi_head_attention.default})
_WHOLE_LAYER = "{} is a whole layer, whose parts torch.backends.mha.set_fastpath_enabled(False) brings to light"


# One call -------------------------------------------------------------------------------------------------------------


def called(node: fx.Node) -> fx.Node | None:
    """The call of `scaled_dot_product_attention` whose result a node is.

    Where `passes/preserve` doesn't see it, in a function that Dynamo keeps whole or under autocast, it is the first
    result of what AOTAutograd makes of it on a CPU.
    """
    if original(node.target) is aten.scaled_dot_product_attention.default:
        return node
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    call = source(node)
    return call if call.target is aten._scaled_dot_product_flash_attention_for_cpu.default else None


def _called(node: fx.Node, call: fx.Node, c: Canonicaliser) -> Match | Miss:
    if call is not node and any(user is not node and user.users for user in call.users):
        return Miss(KIND, node, "its sums are used")
    names = (argument.name for argument in call.target._schema.arguments)  # type: ignore[union-attr]  # an OpOverload
    given: dict[str, Any] = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    query, key, value = (operand(given[name], takes_factors=name != "value") for name in ("query", "key", "value"))
    mask, scale = given.get("attn_mask"), given.get("scale")
    head_dim = values.last_dim(given["query"])
    if scale is None and head_dim:
        scale = 1 / math.sqrt(head_dim)
    if given.get("dropout_p", 0.0) != 0:
        return Miss(KIND, node, "it has dropout")
    if not isinstance(scale, (int, float)):
        sizes = _text(tuple(values.shape(given["query"])))
        return Miss(KIND, node, "its scale is known only when it runs: its query is {}", (sizes,))
    added = (Addition(values.strip_widening(mask), shape=values.shape(node)),) if mask is not None else ()
    flag = CAUSAL_FLAG if given.get("is_causal", False) else NO_MASK
    return _attention(node, Scores(query, key, float(scale), added), value, c, mask=flag)


def _fused(node: fx.Node, c: Canonicaliser) -> Match | Miss:
    found = read(node)
    if isinstance(found, str):
        return Miss(KIND, node, "{}", (found,))
    return _attention(node, found.scores, found.value, c, mask=found.mask, compressed=found.compressed)


# Written out ----------------------------------------------------------------------------------------------------------


def _written_out(node: fx.Node, c: Canonicaliser) -> Match | Miss | None:
    """matmul(softmax(scores), v)."""
    left, right = node.args[:2]
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    softmax, traits = _softmax(left)
    if softmax is None:
        return None
    below, sink = _without_sinks(source(softmax)) if "sinks" in traits else (source(softmax), None)
    found = scores(below) if below is not None else None
    if found is None:
        return Miss(KIND, node, "what is multiplied is a softmax, but not of scale * q k^T", place=softmax, matched=1)
    for trait in traits:
        found = found.having(trait)
    return _attention(node, found, operand(right, takes_factors=False), c, softmax=softmax, sink=sink)


_SOFTMAXES = (aten._softmax.default, aten._safe_softmax.default)


def _softmax(weights: fx.Node) -> tuple[fx.Node | None, tuple[str, ...]]:
    """The softmax along the last axis below a matmul's left operand, and what is done to its weights on the way."""
    node, traits = weights, list[str]()
    while True:
        if changes_no_value(node):
            node = source(node)
        elif node.target is aten.slice.Tensor and _cuts_the_last(node):
            traits.append("sinks")
            node = source(node)
        elif node.target is operator.getitem and source(node).target is aten.native_dropout.default:
            traits.append("dropout")
            node = source(source(node))
        else:
            break
    softmax = node if node.target in _SOFTMAXES and is_last(node.args[1], node) else _exponentials(node)
    if not traits and _are_read(node):
        traits.append("weights that are read elsewhere too")
    return softmax, tuple(traits)


def _are_read(weights: fx.Node) -> bool:
    """Whether something else reads weights than products with values: then they are computed, whatever the rest is."""
    return any(not is_matmul(user) and not (changes_no_value(user) and not _are_read(user)) for user in weights.users)


def _exponentials(node: fx.Node) -> fx.Node | None:
    """Of e / e.sum(-1, keepdim=True): e, if it is exp(x). That is the softmax of x."""
    if node.target is not aten.div.Tensor or len(node.all_input_nodes) != 2:
        return None
    above, below = node.all_input_nodes
    is_sum = below.target is aten.sum.dim_IntList and below.args[0] is above and below.args[2:] == (True,)
    return above if is_sum and above.target is aten.exp.default and is_last(below.args[1], above) else None


def _cuts_the_last(node: fx.Node) -> bool:
    """True for x[..., :-1]."""
    given: Any = dict(zip(("dim", "start", "end", "step"), node.args[1:], strict=False))
    before, after = values.shape(source(node)), values.shape(node)
    along_last = given.get("dim", 0) % len(before) == len(before) - 1
    from_first = given.get("start") in (0, None) and given.get("step", 1) == 1
    return along_last and from_first and known_equal(before[-1] - 1, after[-1])


def _without_sinks(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Of cat([scores, sinks], -1), less the maximum of each row or not: the scores, and the sinks."""
    while values.is_float_cast(node) or node.target in COPIES or node.target is aten.sub.Tensor:
        node = source(node)
    parts = node.args[0] if node.target is aten.cat.default else ()
    rank = len(values.shape(node))
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or not isinstance(node.args[-1], int):
        return None, None
    below, sink = parts
    if node.args[-1] % rank != rank - 1 or not isinstance(below, fx.Node) or not isinstance(sink, fx.Node):
        return None, None
    return below, sink


# Both -----------------------------------------------------------------------------------------------------------------


def _attention(
    node: fx.Node,
    found: Scores,
    value: Operand,
    c: Canonicaliser,
    *,
    mask: Mask = NO_MASK,
    compressed: fx.Node | None = None,
    softmax: fx.Node | None = None,
    sink: fx.Node | None = None,
) -> Match | Miss:
    heads = _heads(found.q, found.k, value)
    if isinstance(heads, str):
        return Miss(KIND, node, "{}", (heads,), matched=2)
    inputs = {"query": found.q.node, "key": found.k.node, "value": value.node}
    if compressed is not None:
        inputs["compressed_mask"] = compressed  # it is read, and hides what `mask` says
    q_len, kv_len = (values.shape(o.node)[-1 if o.transposed else -2] for o in (found.q, found.k))
    traits, hides = list(found.traits), False
    masks = [(c.masks.of(added.node, q_len, kv_len, hides=added.hides), added) for added in found.additions]
    for of, addition in sorted(masks, key=lambda pair: pair[0].kind == "all_true"):  # what hides something goes first
        name = "bias" if of.kind == "bias" else "mask"
        if name in inputs:
            traits += [f"a second {name}"] if of.kind != "all_true" else []
            inputs[f"{name}_{len(inputs)}"] = addition.node
            continue
        inputs[name] = addition.node
        traits += _traits(addition, found.q, name == "bias")
        if name == "mask" or mask is NO_MASK:
            mask = _with_fill(of, addition)
            hides = addition.hides
    if sink is not None:
        inputs["sink"] = sink
    spelling = spell(node, inputs, c)
    numbers = {c.numbers[n] for n in inputs.values()}
    cone = walk(node, lambda n: c.numbers[n] in numbers, limit=96)
    if spelling is None or cone is None:
        return Miss(KIND, node, "an op with effects stands between its inputs and its result", matched=3)
    params = Attention(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        scale=found.scale * found.q.scale * found.k.scale,
        mask=mask,
        hides=hides,
        blank_rows=_blank_rows(mask, softmax),
        traits=tuple(traits),
        key_transposed=found.k.transposed,
        merged=found.q.merged,
        is_written_out=softmax is not None,
        steps=frozenset(values.dtype(n) for n in cone.nodes if values.is_float(n)),
        spelling=spelling,
    )
    return Match(KIND, node, inputs, params, cone.nodes)


def _heads(q: Operand, k: Operand, v: Operand) -> tuple[int, int] | str:
    """The heads of query, and of key and value; or why they don't fit."""
    shapes = [values.shape(o.node) for o in (q, k, v)]
    ranks = {len(shape) for shape in shapes}
    if len({o.merged for o in (q, k, v)}) != 1 or not ranks <= {3, 4} or len(ranks) != 1:
        return f"q, k and v have shapes {', '.join(map(_text, shapes))}, not [batch, heads, tokens, head_dim] each"
    if not all(known_equal(shapes[0][0], shape[0]) for shape in shapes):
        return f"q, k and v have batches of {', '.join(str(shape[0]) for shape in shapes)}"
    if ranks == {3}:
        return 1, 1
    heads, of_k, of_v = (static_int(shape[1]) for shape in shapes)
    if heads is None or of_k is None or of_k != of_v or heads % of_k:
        return f"q, k and v have {', '.join(str(shape[1]) for shape in shapes)} heads"
    if any(o.repeats not in (1, heads // of_k) for o in (k, v)):
        return f"heads of k and v are repeated {k.repeats} and {v.repeats} times, for {heads} heads of q"
    return heads, of_k


def _text(shape: tuple[Size, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _traits(addition: Addition, q: Operand, is_bias: bool) -> list[str]:
    """What of a mask no op knows."""
    traits = []
    leading = (1, 1, *values.shape(addition.node)[:-2])[-2:]
    of_scores, of_q = addition.shape[:-2], values.shape(q.node)[:-2]
    fits = values.same_shape(of_scores, of_q) or (
        is_bias and q.merged and values.same_shape(of_scores, (of_q[0] * of_q[1],))
    )
    if not fits and any(static_int(size) != 1 for size in leading):
        traits.append(f"a mask of scores {_text(addition.shape)} for a q of {_text(values.shape(q.node))}")
    if addition.fill > addition.lowest:
        traits.append(f"the score {addition.fill:g} for hidden keys")
    return traits


def _with_fill(mask: Mask, addition: Addition) -> Mask:
    """The mask, hiding by what hides: -inf, or the lowest number there is."""
    if values.dtype(addition.node) != torch.bool or addition.fill == -math.inf:
        return mask
    return replace(mask, lowest=True)


def _blank_rows(mask: Mask, softmax: fx.Node | None) -> Literal["zeros", "NaN", "mean"]:
    if mask.lowest:
        return "mean"
    return "zeros" if softmax is None or softmax.target is aten._safe_softmax.default else "NaN"
