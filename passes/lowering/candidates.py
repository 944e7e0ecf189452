"""A site that several ops may stand for: they are tried in order, and the first that is legal is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import Lacking, OpContract
from ..edit import Edit, Refused


def first_legal(candidates: Mapping[str, Callable[[OpContract], None]], edit: Edit) -> OpContract:
    """Lowers a site to the first op that may stand for it.

    Args:
        candidates: by the op's name, in order of preference, what rewrites the site to it.
        edit: the rewrite of the site.

    Raises:
        Refused: none may; with the reasons of all, those that are alike once.
    """
    names_by_reason: dict[str, list[str]] = {}
    is_lacking = True
    for name, build in candidates.items():
        contract = CONTRACTS[name]
        try:
            with edit.attempt():
                build(contract)
            return contract
        except Refused as refusal:
            names_by_reason.setdefault(str(refusal), []).append(name.partition("::")[2])
            is_lacking &= refusal.is_lacking
    told = [f"{' and '.join(names)}: {reason}" for reason, names in names_by_reason.items()]
    reason = next(iter(names_by_reason)) if len(names_by_reason) == 1 else "; ".join(told)
    raise Refused(Lacking(reason) if is_lacking else reason)
