"""How what a caller sees of a compiled program differs from eager: types, strides, shared memory, numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .shadow import Shadow

Tensor = torch.Tensor
# What is fused may be this many times as far from exact maths as eager or a noisy twin is.
_TIMES = 8.0


@dataclass
class Call:
    """One call: what it was given, what it gave, and what the model holds behind it."""

    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    held: dict[str, Tensor]

    @classmethod
    def of(cls, model: torch.nn.Module, arguments: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
        return cls(arguments, results, dict(model.named_parameters()) | dict(model.named_buffers()))

    def all(self) -> dict[str, Tensor]:
        """Every tensor that the caller can look at."""
        named = {f"result {i}": t for i, t in enumerate(self.results)}
        return {**named, **{f"argument {i}": t for i, t in enumerate(self.arguments)}, **self.held}

    def copied(self) -> Call:
        """A copy that later calls don't write, whose tensors share memory as those of the call do."""
        copies: dict[int, Any] = {}
        objects: dict[int, Tensor] = {}

        def copied(t: Tensor) -> Tensor:
            if id(t) not in objects:
                storage = t.untyped_storage()
                if storage._cdata not in copies:
                    copies[storage._cdata] = storage.clone()
                fresh = torch.empty(0, dtype=t.dtype)
                objects[id(t)] = fresh.set_(copies[storage._cdata], t.storage_offset(), t.shape, t.stride())
            return objects[id(t)]

        held = {name: copied(t) for name, t in self.held.items()}
        return Call(tuple(map(copied, self.arguments)), tuple(map(copied, self.results)), held)


def of_forms(found: Call, wanted: Call, packs: bool, is_dynamos: bool) -> list[str]:
    """Differences of types, shapes, strides and shared memory.

    Args:
        found: of the compiled program.
        wanted: of eager.
        packs: whether parameters may be moved.
        is_dynamos: whether Dynamo calls the graph, which gives back the objects that it was given.
    """
    told = []
    ours, theirs = found.all(), wanted.all()
    # Parameters that are packed lie elsewhere, and views of them too.
    packed = {t.untyped_storage()._cdata for t in wanted.held.values()} if packs else set()
    moved = {name for name, t in theirs.items() if t.untyped_storage()._cdata in packed}
    for name, b in theirs.items():
        a = ours[name]
        if a.dtype != b.dtype:
            told.append(f"{name}: dtype {a.dtype}, not {b.dtype}")
        elif a.shape != b.shape:
            told.append(f"{name}: shape {list(a.shape)}, not {list(b.shape)}")
        elif used_strides(a) != used_strides(b) and name not in moved:
            told.append(f"{name}: strides {a.stride()}, not {b.stride()}")
    relations = _RELATIONS if is_dynamos else {_SHARED: _RELATIONS[_SHARED]}
    names = list(theirs)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if not {a, b} <= moved]
    for first, second in pairs:
        for relation, holds in relations.items():
            is_so = holds(theirs[first], theirs[second])
            if holds(ours[first], ours[second]) != is_so:
                told.append(f"{first}, {second}: {'not ' if is_so else ''}{relation}")
    return told


def used_strides(t: Tensor) -> tuple[int, ...]:
    """Strides, without those of axes of size one."""
    return tuple(stride for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1) if t.numel() else ()


def _share(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.numel() > 0 and b.numel() > 0


_SHARED = "in one storage"
_RELATIONS: Mapping[str, Callable[[Tensor, Tensor], bool]] = {
    "one object": lambda a, b: a is b,
    _SHARED: _share,
}


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all()) if a.is_floating_point() else torch.equal(a, b)


def is_near(a: Tensor, b: Tensor) -> bool:
    """Whether finite numbers are as near as a rounding or two of the largest in each row: no need to look closer."""
    if not (b.is_floating_point() and b.numel() and b.isfinite().all() and a.isfinite().all()):
        return False
    a, b, unit = a.double(), b.double(), torch.finfo(b.dtype).eps
    return bool(((a - b).abs() <= 2 * unit * (b.abs().amax(-1, keepdim=True) if b.dim() else b.abs())).all())


def of_numbers(found: Tensor, wanted: Tensor, shadow: Shadow) -> str:
    """What of a difference is more than rounding; nothing where none is."""
    if not wanted.numel():
        return ""
    exact = shadow.exact
    noisy = torch.stack(shadow.noisy)
    if not wanted.is_floating_point():
        steps = 1 if wanted.dtype == torch.int8 else 0
        is_open = (noisy != exact).any(0) | (wanted != exact)  # in a row: a choice of one may change the next
        is_open = is_open.any(-1, keepdim=True) if wanted.dim() else is_open
        wrong = ((found.long() - wanted.long()).abs() > steps) & ~is_open
        return f"{int(wrong.sum())} of {wrong.numel()} whole numbers differ" if wrong.any() else ""
    a, b = found.double(), wanted.double()
    # Beyond what the type holds: as it would be rounded.
    rounded = torch.stack([t.to(wanted.dtype).double() for t in (exact, *shadow.noisy)])
    kinds, ours, theirs = _kind(rounded), _kind(a), _kind(b)
    settled = (kinds == theirs).all(0)
    wrong = (ours != theirs) & settled
    # Eager overflows on the way where exact maths doesn't.
    wrong |= (ours != theirs) & ~settled & (ours != kinds).all(0)
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        return f"{a[at]:g}, not {b[at]:g}, at {at} of {list(a.shape)} ({int(wrong.sum())} such)"
    finite = (ours == 0) & (kinds == 0).all(0)
    zero = torch.zeros_like(exact)
    own = torch.where(finite & (theirs == 0), (b - exact).abs(), zero)
    spread = torch.where(finite, (noisy - exact).abs().nan_to_num(0.0, 0.0, 0.0).amax(0), zero)
    allowed = torch.maximum(own, spread)
    allowed = allowed.amax(-1, keepdim=True).expand_as(allowed) if allowed.dim() else allowed
    unit = torch.finfo(wanted.dtype)
    allowed = _TIMES * allowed + 2 * unit.eps * exact.abs() + 4 * unit.smallest_normal
    error = torch.where(finite, (a - exact).abs(), zero)
    wrong = error > allowed
    if not wrong.any():
        return ""
    worst = torch.where(wrong, error / allowed, zero).flatten().argmax()
    at = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
    return (
        f"{a[at]:.9g}, eager {b[at]:.9g}, exact {exact[at]:.9g} at {at} of {list(a.shape)}: error {error[at]:.3g},"
        f" allowed {allowed[at]:.3g} ({int(wrong.sum())} such)"
    )


def of_roundings(found: Tensor, wanted: Tensor) -> str:
    """What shows that one of two narrow results is rounded where the other isn't; nothing where none does.

    Where both are rounded alike, a number differs only where the last bit of a float32 before tips the rounding. Where
    torch's gelu cancels that is one in twenty: on a CPU, float16 and the float32 that is rounded have another erf. Of
    roundings that differ, a quarter shows.
    """
    if wanted.dtype.itemsize > 2:
        return ""
    other = int((~((found == wanted) | (found.isnan() & wanted.isnan()))).sum())
    is_many = other > 1 + wanted.numel() // 12
    return f"{other} of {wanted.numel()} numbers have other bits under exact numerics" if is_many else ""


def _kind(t: Tensor) -> Tensor:
    """0 for finite numbers, 1 and -1 for infinities, 2 for what is no number."""
    return torch.where(t.isnan(), 2.0, torch.where(t.isinf(), t.sign(), 0.0))
