"""The ranks of a process group: how many, where, and that all of them decide alike.

A collective that one rank has fused and another has not never ends. So before a graph in which collectives may be fused
runs, each rank says in the store of torch.distributed what it did, and reads what the others say: either all did the
same, or none fuses a collective.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

_PATIENCE = 300.0  # seconds; ranks start to compile at different times
_PAUSE = 0.02


class RanksDisagreeError(RuntimeError):
    """Ranks that can't come to one decision: the model would hang."""


def process_group(group: str) -> dist.ProcessGroup:
    """The group of a name, as the collectives in a graph have it."""
    return distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type]  # torch's own


def size(group: object) -> int | None:
    """How many ranks a group has; None where there is no such group in this process."""
    if not isinstance(group, str) or not dist.is_available() or not dist.is_initialized():
        return None
    try:
        return process_group(group).size()
    except (RuntimeError, ValueError, KeyError):
        return None


def share_a_host(group: str) -> bool | None:
    """Whether all ranks of a group run on one machine; None where that is not known.

    torchrun and its like give each machine LOCAL_WORLD_SIZE ranks, one after the other.
    """
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not said.isdecimal() or not int(said):
        return None
    return len({rank // int(said) for rank in dist.get_process_group_ranks(process_group(group))}) == 1


def hcom(group: str) -> str:
    """The name that HCCL has for a group on this rank; of a group of another library, its own name."""
    found = process_group(group)
    if dist.get_backend(found) != "hccl":
        return group
    import torch

    name: str = found._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())  # type: ignore[attr-defined]
    return name


def disagreement(group: str, graph: str, decision: str) -> str | None:
    """Compares what this rank decided with what the others of a group did.

    Graphs that are alike are told apart by how many of them a rank has compiled: all ranks compile the same, in one
    order, or one of them waits here in vain.

    Args:
        group: its name.
        graph: a digest of the graph, alike on all ranks that compile the same.
        decision: one line for each place that was decided about.

    Returns:
        None where all decided the same; else in what they differ, as a sentence that is the same on all of them.

    Raises:
        RanksDisagreeError: a rank doesn't compile this graph.
    """
    found = process_group(group)
    ranks = dist.get_process_group_ranks(found)
    if len(ranks) < 2 or dist.get_backend(found) == "fake":
        return None
    store = distributed_c10d._get_default_store()
    asked = _ASKED.setdefault(store, Counter())
    place = f"npu_fuse/{group}/{graph}/{asked[group, graph]}"
    asked[group, graph] += 1
    told = _all_told(distributed_c10d.PrefixStore(place, store), ranks, decision)
    first, *others = ranks
    other = next((rank for rank in others if told[rank] != told[first]), None)
    return None if other is None else _difference(first, told[first], other, told[other])


# How often it was asked about a graph, by group and graph, in the store that is in use.
_ASKED: WeakKeyDictionary[distributed_c10d.Store, Counter[tuple[str, str]]] = WeakKeyDictionary()


def _all_told(store: distributed_c10d.Store, ranks: list[int], decision: str) -> dict[int, str]:
    """What each rank decided, once all have said it. The store is asked now and then: to wait in it would block it."""
    own = dist.get_rank()
    store.set(str(own), decision)
    missing, deadline = ranks, time.monotonic() + _PATIENCE
    while missing := [rank for rank in missing if not store.check([str(rank)])]:
        if time.monotonic() > deadline:
            raise RanksDisagreeError(
                f"rank {own} has compiled a graph whose collectives may be fused, and {_PATIENCE:g} s later"
                f" rank {', '.join(map(str, missing))} has not: all ranks have to compile the same graphs"
            )
        time.sleep(_PAUSE)
    return {rank: store.get(str(rank)).decode() for rank in ranks}


def _difference(first: int, one: str, second: int, other: str) -> str:
    """The first lines in which two decisions differ."""
    pairs = zip([*one.splitlines(), "nothing"], [*other.splitlines(), "nothing"], strict=False)
    a, b = next((pair for pair in pairs if pair[0] != pair[1]), ("this", "that"))
    return f"the ranks decide differently, so that none fuses its collectives: rank {first} {a}; rank {second} {b}"
