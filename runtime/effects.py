"""Ops that write into their arguments without saying so.

An op whose schema doesn't mark what it writes looks like a function of its arguments: dead-code elimination drops it, a
compiler computes equal calls once, reads move across it, and AOTAutograd doesn't know that the buffer has changed. Such
an op is registered here. Then it is kept, in order; and where a graph is ours it is called by an op that says what it
writes, until the graph is functional and the write is put back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket


@dataclass(frozen=True, slots=True)
class Effect:
    """What a registered op does besides giving results.

    Args:
        op: the op.
        mutates: the arguments that it writes, whether its schema says so or not. Empty: it does something else, that no
            argument shows.
        returns: results that are arguments themselves, by position.
        truthful: an op of ours that does the same and says so: it writes `mutates`, and gives the results that aren't
            arguments. None where the schema of `op` says all.
    """

    op: OpOverload
    mutates: tuple[str, ...]
    returns: Mapping[int, str]
    truthful: OpOverload | None


_WHO = "register_side_effects"
_EFFECTS: dict[OpOverload, Effect] = {}
_BY_TRUTHFUL: dict[OpOverload, Effect] = {}


def register_side_effects(
    op: str | OpOverload | OpOverloadPacket,
    mutates: Sequence[str] = (),
    returns: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Says what an op does that its schema doesn't say: from then on it is kept, and kept in order.

    Args:
        op: an op, or its name: `"mylib::store"`, `"mylib::store.overload"`.
        mutates: names of the arguments that it writes. They are all that it does: where nothing reads them afterwards,
            and no result is used, the call may go. Without any, the op has an effect that no argument shows, and each
            call is kept where it is.
        returns: results that are arguments themselves, such as `{0: "cache"}`.

    Raises:
        ValueError: there is no such op; it has no such argument or result; the argument is no tensor, or one to be
            given back is a list; the op has several overloads and none is named; or it is registered with other
            effects.
    """
    overload = overload_of(op)
    arguments = {argument.name: argument for argument in overload._schema.arguments}
    for name in (*mutates, *returns.values()):
        if name not in arguments:
            raise ValueError(f"{_WHO}: {overload} has no argument {name!r}; it has {', '.join(arguments)}")
        if "Tensor" not in str(arguments[name].type):
            raise ValueError(f"{_WHO}: {name!r} of {overload} is {arguments[name].type}, not a tensor")
    for place, name in returns.items():
        if "List" in str(arguments[name].type):
            raise ValueError(f"{_WHO}: {name!r} of {overload} is a list of tensors, which result {place} can't be")
        if place not in range(len(overload._schema.returns)):
            raise ValueError(f"{_WHO}: {overload} has no result {place}: {overload._schema}")
    for place, result in enumerate(overload._schema.returns):
        if result.alias_info is not None and place not in returns:
            raise ValueError(f"{_WHO}: result {place} of {overload} is an argument; say in `returns` which")
    declared = declared_writes(overload)
    written = tuple(name for name in arguments if name in {*mutates, *declared})
    known = _EFFECTS.get(overload)
    if known is not None:
        if (known.mutates, dict(known.returns)) != (written, dict(returns)):
            raise ValueError(
                f"{_WHO}: {overload} is registered already, as writing {', '.join(known.mutates) or '-'}"
                f" and giving {dict(known.returns)}"
            )
        return
    truthful = _truthful(overload, written, dict(returns)) if set(written) - set(declared) else None
    effect = _EFFECTS[overload] = Effect(overload, written, dict(returns), truthful)
    if truthful is not None:
        _BY_TRUTHFUL[truthful] = effect
    torch.fx.node.has_side_effect(overload)
    if overload._overloadname == "default":
        torch.fx.node.has_side_effect(overload.overloadpacket)


def effect_of(target: object) -> Effect | None:
    """The effect of an op, as it was registered, or None."""
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, "default", None)
    return _EFFECTS.get(target) if isinstance(target, OpOverload) else None


def registered() -> list[str]:
    """All effects that are registered, a line each, in order of the ops' names."""
    return sorted(f"{e.op} writes {e.mutates}, returns {dict(e.returns)}, {e.truthful}" for e in _EFFECTS.values())


def told_by(target: object) -> Effect | None:
    """The effect that an op of ours tells in place of the op that has it, or None."""
    return _BY_TRUTHFUL.get(target) if isinstance(target, OpOverload) else None


def declared_writes(target: object) -> tuple[str, ...]:
    """The arguments that an op writes by its schema."""
    return _written_by(target) if isinstance(target, OpOverload) else ()


@functools.cache
def _written_by(op: OpOverload) -> tuple[str, ...]:
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def writes(target: object) -> tuple[str, ...]:
    """The arguments that an op writes, by its schema or by registration."""
    effect = effect_of(target)
    return declared_writes(target) if effect is None else effect.mutates


def overload_of(op: str | OpOverload | OpOverloadPacket) -> OpOverload:
    """The op that is meant.

    Raises:
        ValueError: there is none of this name, or several overloads.
    """
    if isinstance(op, OpOverload):
        return op
    packet: Any = op
    overload = ""
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        name, _, overload = name.partition(".")
        packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
        if packet is None or (overload and overload not in packet.overloads()):
            raise ValueError(f"there is no op {op!r}; names are 'namespace::name' or with .overload")
    if not overload and len(packet.overloads()) > 1:
        raise ValueError(f"{packet} has several overloads ({', '.join(packet.overloads())}); name one")
    found: OpOverload = getattr(packet, overload or packet.overloads()[0])
    return found


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("npu_fuse", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own


def _truthful(op: OpOverload, mutates: tuple[str, ...], returns: dict[int, str]) -> OpOverload:
    """Defines an op that does what `op` does, and whose schema marks what it writes."""
    arguments, _, _ = str(op._schema).partition("(")[2].rpartition(") -> ")
    arguments = re.sub(r"\([a-z]\w*!?(?: -> [^)]*)?\)", "", arguments)  # the marks that it has
    for number, name in enumerate(mutates):
        arguments = re.sub(rf"\bTensor(?=(?:\?|\[\d*\])* {name}\b)", f"Tensor(w{number}!)", arguments)
    kept = [i for i in range(len(op._schema.returns)) if i not in returns]
    results = ", ".join(str(op._schema.returns[i].type) for i in kept)
    name = op._schema.name.replace("::", "_") + (f"_{op._overloadname}" if op._overloadname != "default" else "")

    def run(*args: Any, **kwargs: Any) -> Any:
        results = op(*args, **kwargs)
        if not returns:
            return results
        results = results if isinstance(results, tuple) else (results,)
        left = tuple(results[i] for i in kept)
        return None if not left else left[0] if len(left) == 1 else left

    library = _library()
    tags = (torch.Tag.pt2_compliant_tag,)
    library.define(f"{name}({arguments}) -> ({results})", tags=tags)  # type: ignore[no-untyped-call]  # torch's own
    library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's own
    torch.library.register_fake(f"npu_fuse::{name}", run, lib=library)
    truthful: OpOverload = getattr(torch.ops.npu_fuse, name).default
    return truthful


# Ops that are known to write what their schema doesn't mark, with results that are arguments. Where an op of such a
# name has other arguments than these, it isn't the op that is meant.
_KNOWN: Mapping[str, tuple[tuple[str, ...], Mapping[int, str]]] = {
    # sgl_kernel_npu
    "npu::causal_conv1d": (("conv_states",), {}),
    "npu::build_tree_kernel_efficient": (
        ("tree_mask", "positions", "retrive_index", "retrive_next_token", "retrive_next_sibling"),
        {},
    ),
    "npu::cache_loc_assign": (("token_pool",), {0: "token_pool"}),
    "npu::cache_loc_update": (("out_cache_loc",), {0: "out_cache_loc"}),
    "npu::assign_cache_op": (("out",), {}),
    # torch_npu
    "npu::npu_apply_rotary_pos_emb": (("query", "key"), {0: "query", 1: "key"}),
    "npu::npu_kv_rmsnorm_rope_cache": (("k_cache", "ckv_cache"), {0: "k_cache", 1: "ckv_cache"}),
    # vllm-ascend
    "_C_ascend::npu_causal_conv1d_custom": (("output", "conv_state"), {0: "output"}),
    "_C_ascend::npu_causal_conv1d_310": (("conv_states",), {}),
    "_C_ascend::store_kv_block": (("key_cache_in",), {}),
    "_C_ascend::store_kv_block_metadata": (("group_len", "group_key_idx", "group_key_cache_idx"), {}),
}


def register_known() -> None:
    """Registers the ops that are known to write undeclared, those that exist; what a user has registered stays."""
    for name, (mutates, returns) in _KNOWN.items():
        namespace, _, unqualified = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), unqualified, None)
        if packet is None or packet.overloads() != ["default"] or packet.default in _EFFECTS:
            continue
        if {*mutates} <= {argument.name for argument in packet.default._schema.arguments}:
            register_side_effects(packet.default, mutates, returns)
