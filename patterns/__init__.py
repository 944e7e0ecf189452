"""What things are. Recognition is exact and touches nothing: a graph comes out of this room as it went in.

`recognise` works out the term of every node beside the graph, and asks the `RULES` what each node is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import (
    add_rms_norm,
    attention,
    causal_conv1d,
    clipped_swiglu,
    fast_gelu,
    gated_delta_rule,
    glu,
    group_norm_silu,
    grouped_moe_gating,
    kv_cache_write,
    latent_cache_write,
    mm_all_reduce,
    moe_gating,
    norm_cast,
    norm_quant,
    paged_attention,
    qk_rope,
    qkv,
    rms_norm,
    rope,
    tp_rms_norm,
    transpose_batchmatmul,
)
from .canonical import Canonicaliser
from .match import Findings, Match, Miss, RuleError
from .term import Term, TermPool


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind.

    Args:
        kind: its name in reports and options.
        match: says whether a node is the root of one, or nearly.
        term: what larger rules see of a match in place of its formula; by default the formula.
    """

    kind: str
    match: Callable[[fx.Node, Canonicaliser, Findings], Match | Miss | None]
    term: Callable[[TermPool, Match, Canonicaliser], Term] | None = None


# In order: a rule may use the matches of the rules above it.
RULES: tuple[Rule, ...] = (
    Rule(rms_norm.KIND, rms_norm.match, rms_norm.term),
    Rule(tp_rms_norm.KIND, tp_rms_norm.match),
    Rule(rope.KIND, rope.match),
    Rule(add_rms_norm.KIND, add_rms_norm.match),
    Rule(norm_cast.KIND, norm_cast.match),
    Rule(norm_quant.KIND, norm_quant.match),
    Rule(qk_rope.KIND, qk_rope.match),
    Rule(qkv.CHAIN, qkv.match_chain),
    Rule(qkv.ROPE_THEN_NORM, qkv.match_rope_then_norm),
    Rule(qkv.KIND, qkv.match),
    Rule(mm_all_reduce.KIND, mm_all_reduce.match),
    Rule(glu.KIND, glu.match),
    Rule(fast_gelu.KIND, fast_gelu.match),
    Rule(clipped_swiglu.KIND, clipped_swiglu.match),
    Rule(group_norm_silu.KIND, group_norm_silu.match),
    Rule(transpose_batchmatmul.KIND, transpose_batchmatmul.match),
    Rule(moe_gating.KIND, moe_gating.match),
    Rule(grouped_moe_gating.KIND, grouped_moe_gating.match),
    Rule(attention.KIND, attention.match),
    Rule(paged_attention.KIND, paged_attention.match),
    Rule(causal_conv1d.KIND, causal_conv1d.match),
    Rule(gated_delta_rule.KIND, gated_delta_rule.match),
    Rule(kv_cache_write.KIND, kv_cache_write.match),
    Rule(latent_cache_write.KIND, latent_cache_write.match),
)
KINDS: tuple[str, ...] = tuple(rule.kind for rule in RULES)


def recognise(graph: fx.Graph, rules: Sequence[Rule] = RULES) -> Findings:
    """Finds what `rules` know in an ATen graph whose nodes carry fake values in `meta["val"]`.

    Raises:
        RuleError: a rule raised something.
    """
    with unset_fake_temporarily():  # movement and rotations are found by running them on real numbers
        return _recognise(graph, rules)


def _recognise(graph: fx.Graph, rules: Sequence[Rule]) -> Findings:
    canonicaliser = Canonicaliser(TermPool())
    findings = Findings()
    for node in graph.nodes:
        if node.op == "output":
            continue
        canonicaliser.visit(node)
        for rule in rules if node.op == "call_function" else ():
            try:
                found = rule.match(node, canonicaliser, findings)
                if found is None:
                    continue
                if isinstance(found, Miss):
                    findings.note(found)
                else:
                    findings.add(found)
                    if rule.term is not None:
                        canonicaliser.terms[node] = rule.term(canonicaliser.pool, found, canonicaliser)
            except Exception as error:
                raise RuleError(rule.kind, node) from error
    return findings
