"""Takes the largest legal matches first and rewrites them; says of every other why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..patterns import qkv, tp_rms_norm, values
from ..patterns.match import Findings, Match, Miss
from ..runtime.options import Options
from .agreement import GROUP
from .cleanup import check_order
from .edit import Refused
from .lowering import Lowering
from .ranges import SITE
from .report import Site
from .rewriter import Rewriter
from .views.code import lines
from .withheld import Part, PartFailed, Withheld

FUSE = "fuse"


def fuse(
    rewriter: Rewriter,
    findings: Findings,
    options: Options,
    lowerings: Mapping[str, Lowering],
    withheld: Withheld,
) -> list[Site]:
    """Rewrites what the contracts allow.

    Args:
        rewriter: of the graph.
        findings: what was recognised in it.
        options: what the user set.
        lowerings: how each kind is rewritten, the largest first.
        withheld: what is left alone.

    Returns:
        A site for each match and near miss, in graph order.

    Raises:
        PartFailed: a lowering raised, or left a graph that isn't whole.
    """
    matches = findings.all()
    misses = findings.near_misses()
    order = {node: i for i, node in enumerate(rewriter.graph.nodes)}
    placed: list[tuple[int, Site]] = [(order[miss.node], _missed(miss)) for miss in misses]
    sites = {match: _site(match) for match in matches}
    if options.keep_lines:
        for match, site in sites.items():
            site.before = lines(match.claimed)
    placed += [(order[match.node], site) for match, site in sites.items()]
    for kind, lower in lowerings.items():
        own = [match for match in matches if match.kind == kind]
        try:
            for match in own:
                if rewriter.is_alive(match.node):
                    _rewrite(match, lower, rewriter, sites, options, withheld)
            if any(sites[match].status == "lowered" for match in own):
                check_order(rewriter.graph)
        except Exception as error:
            raise PartFailed(Part(FUSE, kind)) from error
    rewriter.settle_views()
    rewriter.graph.lint()
    _settle(sites)
    return [site for _, site in sorted(placed, key=lambda item: item[0])]


def _rewrite(
    match: Match, lower: Lowering, rewriter: Rewriter, sites: dict[Match, Site], options: Options, withheld: Withheld
) -> None:
    """Rewrites one match where its contract allows, and lets its site say what became of it."""
    site = sites[match]
    try:
        _refuse_withheld(match, options, withheld)
        with rewriter.edit(match.node, match.claimed) as edit:
            contract = lower(match, edit)
    except Refused as refusal:
        site.status, site.reason, site.is_lacking = "refused", str(refusal), refusal.is_lacking
        return
    _lowered(site, contract.name, edit.notes)
    if edit.rewrite is not None:
        edit.rewrite.site = site
    for node in edit.created:
        node.meta[SITE] = f"{match.kind}: {site.where}"
    if options.keep_lines:
        site.after = lines(sorted(node for node in edit.created if rewriter.is_alive(node)))
    for part in match.parts:
        if part in sites and not rewriter.is_alive(part.node):
            _lowered(sites[part], contract.name)


def _refuse_withheld(match: Match, options: Options, withheld: Withheld) -> None:
    """Refuses a site that is to be left alone, whatever its contract says."""
    kind = match.kind
    if kind in options.disable:
        raise Refused(f"{kind} is turned off by Options.disable")
    failure = withheld.parts.get(Part(FUSE, kind))
    if failure is not None:
        raise Refused(f"its rewriting failed internally: {failure.strip().splitlines()[-1]}")
    reason = withheld.sites.get((kind, match.node.name))
    if reason is not None:
        raise Refused(reason)
    reason = withheld.groups.get(match.params.public().get(GROUP, "")) if withheld.groups else None
    if reason is not None:
        raise Refused(reason)


def _lowered(site: Site, op: str, notes: Sequence[str] = ()) -> None:
    site.status, site.op, site.reason, site.roundings = "lowered", op, None, tuple(notes)


def _site(match: Match) -> Site:
    return Site(
        match.kind,
        "refused",
        module=values.module_path(match.node),
        source=values.source_line(match.node),
        params=match.params.public(),
    )


def _missed(miss: Miss) -> Site:
    module, source = values.module_path(miss.node), values.source_line(miss.node)
    return Site(miss.kind, "missed", reason=miss.reason, module=module, source=source)


def _settle(sites: dict[Match, Site]) -> None:
    """Gives the kinds that have no op of their own the outcome of what they are part of."""
    prologues = [match for match in sites if match.kind == qkv.KIND]
    for match, site in sites.items():
        if match.kind == qkv.CHAIN:
            outer = next((m for m in prologues if match.parts[-1] in m.parts), None)
            if outer is None:
                site.reason = "no projection of q, k and v was found around it"
            else:
                site.status, site.op, site.reason = sites[outer].status, sites[outer].op, sites[outer].reason
        elif match.kind == qkv.ROPE_THEN_NORM:
            site.reason = "the norm comes after the rotation; split_qkv_rmsnorm_rope norms before it"
        elif match.kind == tp_rms_norm.KIND and site.status != "lowered":
            site.reason = "an op norms over ranks in a prologue of attention alone, of which it is no part here"
            outer = next((m for m in prologues if match in m.parts), None)
            site.reason = site.reason if outer is None else sites[outer].reason
