"""Rotations that nobody listed: spelled at random they are recognised, with one thing wrong they are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import compiled, repeats

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEAD_DIM = 16
Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

# The first and the second elements of all pairs.
CUTS: dict[str, dict[str, Callable[[Tensor], Pair]]] = {
    "half": {
        "chunk": lambda x: x.chunk(2, -1),
        "split": lambda x: x.split(x.shape[-1] // 2, -1),
        "slices": lambda x: (x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]),
        "unflatten, unbind": lambda x: x.unflatten(-1, (2, -1)).unbind(-2),
        "view, select": lambda x: (x.unflatten(-1, (2, -1)).select(-2, 0), x.unflatten(-1, (2, -1))[..., 1, :]),
    },
    "interleave": {
        "strides": lambda x: (x[..., ::2], x[..., 1::2]),
        "unflatten, unbind": lambda x: x.unflatten(-1, (-1, 2)).unbind(-1),
        "reshape, index": lambda x: (x.reshape(*x.shape[:-1], -1, 2)[..., 0], x.reshape(*x.shape[:-1], -1, 2)[..., 1]),
        "transposed halves": lambda x: x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2).chunk(2, -1),
    },
}


def _written(a: Tensor, b: Tensor) -> Tensor:
    y = a.new_empty((*a.shape[:-1], 2 * a.shape[-1]))
    y[..., ::2], y[..., 1::2] = a, b
    return y


JOINS: dict[str, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "half": {
        "cat": lambda a, b: torch.cat((a, b), -1),
        "stack": lambda a, b: torch.stack((a, b), -2).flatten(-2),
    },
    "interleave": {
        "stack": lambda a, b: torch.stack((a, b), -1).flatten(-2),
        "stack, reshape": lambda a, b: torch.stack([a, b], dim=-1).reshape(*a.shape[:-1], -1),
        "written": _written,
    },
}
SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "-b": lambda b: -b,
    "neg": torch.neg,
    "b * -1": lambda b: b * -1,
    "0 - b": lambda b: torch.rsub(b, 0),
}


@dataclass(frozen=True)
class Spelling:
    """How one rotation is written."""

    style: str
    whole: bool  # x * cos + rotate(x) * sin, or both halves on their own
    cut: str
    join: str
    sign: str
    wide: bool
    narrowed: torch.dtype | None
    start: int
    rope_dim: int
    separate_tables: bool
    swapped: bool
    wrong: str | None = None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        end = self.start + self.rope_dim
        before, after = x[..., : self.start], x[..., end:]
        x = x[..., self.start : end] if self.rope_dim != HEAD_DIM else x
        y = self._rotated(x.float() if self.wide else x, cos, sin)
        if self.narrowed is not None:
            y = y.to(self.narrowed)
        parts = [part.to(y.dtype) for part in (before, y, after) if part.shape[-1]]
        return torch.cat(parts, -1) if len(parts) > 1 else y

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cut, join, minus = CUTS[self.style][self.cut], JOINS[self.style][self.join], SIGNS[self.sign]
        a, b = cut(x)
        if self.wrong == "pairs":
            a, b = b, a
        if self.wrong == "sign":
            minus = lambda b: b.clone()  # noqa: E731  # one of several
        if self.whole:
            turned = join(minus(b), a)
            if self.wrong == "another element":
                turned = turned.roll(1, -1)
            terms = (x * join(*self._tables(cos)), turned * join(*self._tables(sin)))
            return terms[1] + terms[0] if self.swapped else terms[0] + terms[1]
        (cos_a, cos_b), (sin_a, sin_b) = self._tables(cos), self._tables(sin)
        if self.wrong == "another element":
            b = b.roll(1, -1)
        first = a * cos_a + minus(b * sin_a) if self.swapped else a * cos_a - b * sin_a
        if self.wrong == "sign" and not self.swapped:
            first = a * cos_a + b * sin_a
        return join(first, a * sin_b + b * cos_b)

    def _tables(self, table: Tensor) -> Pair:
        """For the first and the second elements."""
        width = self.rope_dim // 2
        return (table[..., :width], table[..., width:]) if self.separate_tables else (table[..., :width],) * 2


@st.composite
def spellings(draw: st.DrawFn) -> Spelling:
    style = draw(st.sampled_from(["half", "interleave"]))
    rope_dim = draw(st.sampled_from([4, 8, HEAD_DIM]))
    whole = draw(st.booleans())
    joins = sorted(set(JOINS[style]) - ({"written"} if whole else set()))
    return Spelling(
        style=style,
        whole=whole,
        cut=draw(st.sampled_from(sorted(CUTS[style]))),
        join=draw(st.sampled_from(joins)),
        sign=draw(st.sampled_from(sorted(SIGNS))),
        wide=draw(st.booleans()),
        narrowed=draw(st.sampled_from([None, BF16, FP16])),
        start=draw(st.sampled_from([0, (HEAD_DIM - rope_dim) // 2, HEAD_DIM - rope_dim])),
        rope_dim=rope_dim,
        separate_tables=style == "half" and draw(st.booleans()),
        swapped=draw(st.booleans()),
    )


def inputs(spelling: Spelling, dtype: torch.dtype = FP32) -> tuple[Tensor, ...]:
    x = torch.randn(2, 3, 5, HEAD_DIM).to(dtype)
    return x, *(torch.randn(5, spelling.rope_dim) for _ in range(2))


@settings(max_examples=80, deadline=None)
@given(spelling=spellings(), dtype=st.sampled_from([BF16, FP32]))
def test_any_spelling_is_recognised_and_repeated(spelling: Spelling, dtype: torch.dtype) -> None:
    found = compiled(spelling, *inputs(spelling, dtype))
    (match,) = found.findings().of("rope")
    p = match.params
    assert (p.style, p.rope_start, p.rope_dim, p.backward) == (spelling.style, spelling.start, spelling.rope_dim, False)
    assert match.inputs["x"].name == "arg0_1"
    assert repeats(match, found.values())


@settings(max_examples=60, deadline=None)
@given(spelling=spellings(), wrong=st.sampled_from(["sign", "pairs", "another element"]))
def test_with_one_thing_wrong_it_is_none(spelling: Spelling, wrong: str) -> None:
    """Exchanging the elements of all pairs may give the rotation by the negative angle: a rotation still."""
    found = compiled(replace(spelling, wrong=wrong), *inputs(spelling))
    assert found.report.count("rope", backward=False) == 0
