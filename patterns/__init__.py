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
    roots,
    rope,
    tp_rms_norm,
    transpose_batchmatmul,
)
from .canonical import Canonicaliser, has_rule
from .match import Findings, Match, Miss, RuleError
from .roots import Target
from .term import Term, TermPool


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind.

    Args:
        kind: its name in reports and options.
        match: says whether a node is the root of one, or nearly.
        term: what larger rules see of a match in place of its formula; by default the formula.
        roots: whether a call of an op may be a root at all, so that only such nodes are looked at; by default any may.
    """

    kind: str
    match: Callable[[fx.Node, Canonicaliser, Findings], Match | Miss | None]
    term: Callable[[TermPool, Match, Canonicaliser], Term] | None = None
    roots: Callable[[Target], bool] | None = None


# In order: a rule may use the matches of the rules above it.
RULES: tuple[Rule, ...] = (
    Rule(rms_norm.KIND, rms_norm.match, rms_norm.term, roots.normed),
    Rule(tp_rms_norm.KIND, tp_rms_norm.match, roots=has_rule),
    Rule(rope.KIND, rope.match, roots=roots.rotated),
    Rule(add_rms_norm.KIND, add_rms_norm.match, roots=roots.normed),
    Rule(norm_cast.KIND, norm_cast.match, roots=roots.cast),
    Rule(norm_quant.KIND, norm_quant.match, roots=roots.quantised),
    Rule(qk_rope.KIND, qk_rope.match, roots=roots.rotated),
    Rule(qkv.CHAIN, qkv.match_chain, roots=roots.rotated),
    Rule(qkv.ROPE_THEN_NORM, qkv.match_rope_then_norm, roots=roots.normed),
    Rule(qkv.KIND, qkv.match, roots=roots.rotated_or_item),
    Rule(mm_all_reduce.KIND, mm_all_reduce.match, roots=roots.waited),
    Rule(glu.KIND, glu.match, roots=roots.combined),
    Rule(fast_gelu.KIND, fast_gelu.match, roots=roots.combined),
    Rule(clipped_swiglu.KIND, clipped_swiglu.match, roots=roots.combined),
    Rule(group_norm_silu.KIND, group_norm_silu.match, roots=roots.combined),
    Rule(transpose_batchmatmul.KIND, transpose_batchmatmul.match, roots=roots.moved),
    Rule(moe_gating.KIND, moe_gating.match, roots=roots.chosen),
    Rule(grouped_moe_gating.KIND, grouped_moe_gating.match, roots=roots.chosen),
    Rule(attention.KIND, attention.match, roots=roots.attended),
    Rule(paged_attention.KIND, paged_attention.match, roots=roots.attended),
    Rule(causal_conv1d.KIND, causal_conv1d.match),
    Rule(gated_delta_rule.KIND, gated_delta_rule.match, roots=roots.summed),
    Rule(kv_cache_write.KIND, kv_cache_write.match, roots=roots.written),
    Rule(latent_cache_write.KIND, latent_cache_write.match, roots=roots.written),
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
    by_target: dict[Target, list[Rule]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        canonicaliser.visit(node)
        if node.op != "call_function":
            continue
        asked = by_target.get(node.target)
        if asked is None:
            asked = [rule for rule in rules if rule.roots is None or rule.roots(node.target)]
            by_target[node.target] = asked
        for rule in asked:
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
