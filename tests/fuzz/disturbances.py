"""What happens around the kinds: views, arithmetic, writes anywhere before, and arguments that share memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from npu_fuse.passes.in_place import overlaps_itself

from .programs import Builder, Choices, Unfit

Tensor = torch.Tensor


def _view(x: str, t: Tensor, c: Choices) -> str:
    """A view of x, or its numbers in another order."""
    axis = c.number(t.dim())
    n = t.shape[axis]
    other = c.number(t.dim())
    forms = [
        f"{x}.transpose({axis}, {other})",
        f"{x}.reshape(-1)",
        f"{x}.unsqueeze({axis})",
        f"{x}.flatten({min(axis, other)}, {max(axis, other)})",
        f"{x}.movedim({axis}, {other})",
        f"{x}.contiguous()",
        f"{x}.clone()",
        f"{x}.flip({axis})",
        f"{x}.mT" if t.dim() >= 2 else f"{x}.squeeze()",
        f"{x}.narrow({axis}, 0, {max(n - 1, 0)})",
        f"{x}.permute({', '.join(str(i) for i in reversed(range(t.dim())))})",
        f"{x}.view({', '.join(str(n) for n in t.shape)})",
        f"{x}.expand({', '.join('-1' for _ in t.shape)})",
        f"{x}.detach()",
    ]
    if n:
        forms += [f"{x}.select({axis}, {c.number(n)})", f"{x}.unbind({axis})[{c.number(n)}]", f"{x}[..., ::2]"]
        forms += [f"{x}.split({(n + 1) // 2}, {axis})[-1]", f"{x}.chunk(2, {axis})[0]", f"{x}.roll(1, {axis})"]
    if n and n % 2 == 0:
        forms += [f"{x}.unflatten({axis}, (2, {n // 2}))", f"{x}.unflatten({axis}, ({n // 2}, 2))"]
    if n == 1:
        forms.append(f"{x}.squeeze({axis})")
    return c.of(forms)


def view(b: Builder, c: Choices) -> None:
    x = b.existing(c, lambda t: t.dim() > 0)
    name = b.let(_view(x, b.of(x), c))
    if b.of(name).is_floating_point():
        b.main(name)


def arithmetic(b: Builder, c: Choices) -> None:
    x = b.existing(c, lambda t: t.is_floating_point())
    t = b.of(x)
    forms = [
        f"{x} * 0.5",
        f"{x} + 1",
        f"-{x}",
        f"{x}.sin()",
        f"F.relu({x})",
        f"{x}.abs()",
        f"torch.tanh({x})",
        f"{x}.to(torch.float32)",
        f"{x}.to(torch.bfloat16)",
        f"{x}.to(torch.float16)",
        f"{x} * {x}",
    ]
    if t.dim():
        forms += [f"{x}.sum(-1)", f"{x}.mean(0, keepdim=True)", f"torch.cat(({x}, {x}), -1)"]
        forms += [f"torch.stack(({x}, {x} * 2))"]
    same = b.candidates(lambda o: o.is_floating_point() and o.shape == t.shape)
    other = c.of(same)
    forms += [f"{x} + {other}", f"{x} * {other}", f"torch.where({x} > 0, {x}, {other})", f"torch.maximum({x}, {other})"]
    b.main(b.let(c.of(forms)))


def _writable(t: Tensor) -> bool:
    return t.is_floating_point() and t.dim() > 0 and t.numel() > 0 and not overlaps_itself(t)


def _write(b: Builder, c: Choices, x: str, names: list[str]) -> str:
    """A statement that writes x, reading others of these names."""
    t = b.of(x)
    same = [name for name in names if b.of(name).shape == t.shape and b.of(name).is_floating_point()]
    other = c.of(same)
    axis = c.number(t.dim())
    last = t.shape[axis] - 1
    forms = [
        f"{x}.mul_(0.5)",
        f"{x}.add_(1)",
        f"{x}.zero_()",
        f"{x}.copy_({other})",
        f"{x}.copy_({x} * 0.5 + 1)",
        f"{x}.add_({other})",
        f"{x}.select({axis}, {c.number(last + 1)}).mul_(2)",
        f"{x}.narrow({axis}, 0, {max(last, 1)}).fill_(0.25)",
        f"{x}[..., -1:].copy_({x}[..., :1])",
        f"{x}[..., :1] = 0.75",
        f"{x}[..., 0] = {other}[..., -1]",
        f"{x}.clamp_(-1, 1)",
        f"{x}.transpose(0, -1).mul_(0.5)",
        f"{x}.index_copy_({axis}, torch.tensor([{last}]), {x}.narrow({axis}, 0, 1) * 2)",
        f"{x}.index_add_({axis}, torch.tensor([0]), {x}.narrow({axis}, {last}, 1))",
        f"{x}.index_fill_({axis}, torch.tensor([{last}]), 0.5)",
        f"{x}[torch.tensor([0])] = 1.5",
        f"{x}.index_put_((torch.tensor([0, 0]),), {x}[:1] * 0.5, accumulate=True)",
        f"{x}.masked_fill_({other} > 1, 0.5)",
        f"{x}.sin_()",
        f"{x}.detach().add_(1)",
        f"torch.add({x}, 1, out={x})" if t.is_contiguous() else f"{x}.sub_(1)",
    ]
    if t.is_contiguous():
        forms += [f"{x}.view(-1)[:2].zero_()", f"{x}.view(-1).mul_(2)"]
    return c.of(forms)


def write(b: Builder, c: Choices) -> None:
    """A write behind everything, or in between."""
    place = len(b.lines)
    if c.number(3) and b.lines:
        place -= c.number(len(b.lines) + 1)
    later = {name for line in b.lines[place:] for name in line.names}
    names = [name for name in b.candidates(_writable) if name not in later]
    if not names:
        raise Unfit
    x = c.of(names)
    statement = _write(b, c, x, names)
    if place == len(b.lines):
        b.do(statement)
    else:
        b.insert(place, statement)


def shared_argument(b: Builder, c: Choices) -> None:
    """An argument that is another one, or a view of it."""
    others = [made.name for made in b.made if made.role == "argument" and b.of(made.name).is_floating_point()]
    if not others:
        raise Unfit
    other = c.of(others)
    t = b.of(other)
    source = other if c.number(3) == 0 or not t.dim() else _view(other, t, c)
    value = eval(source, {"torch": torch, other: t})
    b.main(b.take(source, value))


DISTURBANCES: Mapping[str, Callable[[Builder, Choices], None]] = {
    f.__name__: f for f in (view, arithmetic, write, shared_argument)
}
