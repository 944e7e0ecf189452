"""Every spelling of a rotation is one kind with the right parameters, and its reference repeats it bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import Compiled, compiled, repeats

Tensor = torch.Tensor
D = 16
H = D // 2


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def huggingface(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + rotate_half(x) * s


def chunked(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * c + torch.cat([b.neg(), a], -1) * s


def operands_swapped(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return s * rotate_half(x) + c * x


def minus_one(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.split(H, -1)
    return x * c - torch.cat((b, -a), -1) * s


def halves(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    c, s = c[..., :H], s[..., :H]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def upcast(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return huggingface(x.float(), c.float(), s.float()).to(x.dtype)


def both_terms_upcast(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return ((x * c).float() * 1 if False else x.float() * c + rotate_half(x).float() * s).to(x.dtype)


def partial(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    r, p = x[..., :H], x[..., H:]
    return torch.cat((huggingface(r, c[..., :H], s[..., :H]), p), -1)


def strided(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    c, s = c[..., :H], s[..., :H]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


def unbound(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.view(*x.shape[:-1], H, 2).unbind(-1)
    return x * c + torch.stack((-b, a), -1).flatten(-2) * s


def repeated(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    c, s = (t[..., :H].repeat_interleave(2, -1) for t in (c, s))
    return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s


def complex_numbers(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    table = torch.view_as_complex(torch.stack((c[..., :H].float(), s[..., :H].float()), -1))
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], H, 2))
    return torch.view_as_real(pairs * table).flatten(-2).type_as(x)


def deepseek(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    c, s = c[..., :H], s[..., :H]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def nanochat(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    c, s = c[..., :H], s[..., :H]
    return torch.cat((a * c + b * s, b * c - a * s), -1)


def passes_the_first(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return torch.cat((x[..., :H], huggingface(x[..., H:], c[..., H:], s[..., H:])), -1)


def passes_both_ends(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    rotated = strided(x[..., 4 : 4 + H], c[..., : H // 2], s[..., : H // 2])
    return torch.cat((x[..., :4], rotated, x[..., 4 + H :]), -1)


def halves_with_tables_of_their_own(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * c[..., :H] - b * s[..., :H], b * c[..., H:] + a * s[..., H:]), -1)


def in_place(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = c[..., ::2], s[..., 1::2]
    y = torch.empty_like(x)
    y[..., ::2] = a * c - b * s
    y[..., 1::2] = a * s + b * c
    return y.type_as(x)


HALF = {"style": "half", "backward": False, "rope_dim": D}
PAIRS = {"style": "interleave", "backward": False, "rope_dim": D}
SPELLINGS = {
    huggingface: HALF,
    chunked: HALF,
    operands_swapped: HALF,
    minus_one: HALF,
    halves: HALF,
    upcast: HALF,
    both_terms_upcast: HALF,
    partial: {**HALF, "rope_dim": H},
    strided: PAIRS,
    unbound: PAIRS,
    repeated: PAIRS,
    complex_numbers: PAIRS,
    deepseek: {"style": "deinterleave", "backward": False, "rope_dim": D},
    nanochat: {**HALF, "backward": True},
    passes_the_first: {**HALF, "rope_dim": H, "rope_start": H},
    passes_both_ends: {**PAIRS, "rope_dim": H, "rope_start": 4},
    halves_with_tables_of_their_own: HALF,
    in_place: PAIRS,
}
LAYOUTS = {
    "heads first": ((2, 3, 5, D), (1, 1, 5, D)),
    "tokens first": ((2, 5, 3, D), (2, 5, 1, D)),
    "flat": ((5, 3, D), (5, 1, D)),
    "table of fewer axes": ((2, 3, 5, D), (5, D)),
    "one token": ((1, 3, 1, D), (1, 1, 1, D)),
}


def inputs(layout: str = "heads first", dtype: torch.dtype = torch.float32, wide: bool = False) -> tuple[Tensor, ...]:
    x_shape, table_shape = LAYOUTS[layout]
    table_dtype = torch.float32 if wide else dtype
    return torch.randn(x_shape, dtype=dtype), *(torch.randn(table_shape, dtype=table_dtype) for _ in range(2))


def check(found: Compiled, params: dict[str, object]) -> None:
    """One rotation, with these parameters, that its reference repeats."""
    (match,) = found.findings().of("rope")
    assert {name: match.params.public()[name] for name in params} == params
    assert repeats(match, found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling(spelling, dtype: torch.dtype) -> None:
    check(compiled(spelling, *inputs(dtype=dtype)), SPELLINGS[spelling])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spelling", [huggingface, halves, strided, complex_numbers, partial, deepseek])
@pytest.mark.parametrize("dynamic", [None, True])
def test_every_layout(spelling, layout: str, dynamic: bool | None) -> None:
    arguments = inputs(layout)
    for tensor in arguments:
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    check(compiled(spelling, *arguments, dynamic=dynamic), SPELLINGS[spelling])


def test_an_axis_of_symbolic_size_is_reported() -> None:
    report = compiled(huggingface, *inputs(), dynamic=True).report
    assert report.count("rope") == 0
    assert "the rotated axis has no static size" in [site.reason for site in report.sites]


def test_wide_tables_and_a_cast_back() -> None:
    def olmo(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return huggingface(x, c, s).to(x.dtype)

    found = compiled(olmo, *inputs(dtype=torch.bfloat16, wide=True))
    check(found, HALF)
    (match,) = found.findings().of("rope")
    assert match.params.compute_dtype == torch.float32
    assert match.params.dtype == torch.bfloat16


def test_tables_gathered_from_a_cache() -> None:
    def model(x: Tensor, cache: Tensor, positions: Tensor) -> Tensor:
        c, s = cache[positions][:, None].chunk(2, -1)
        return huggingface(x, c, s)

    x, cache = torch.randn(5, 3, D), torch.randn(32, 2 * D)
    check(compiled(model, x, cache, torch.tensor([4, 0, 31, 7, 7])), HALF)


def test_long_prompts_cost_no_more() -> None:
    x = torch.randn(1, 32, 2048, 128)
    report = compiled(huggingface, x, torch.randn(1, 1, 2048, 128), torch.randn(1, 1, 2048, 128)).report
    assert report.count("rope", head_dim=128) == 1
    assert report.seconds_by_pass["recognise"] < 1


def wrong_sign(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((b, a), -1) * s


def swapped_halves(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-a, b), -1) * s


def sign_off_by_one(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    turned = torch.cat((-x[..., H : H + 1], x[..., H + 1 :], x[..., :H]), -1)
    return x * c + turned * s


def other_pairing(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + x.roll(1, -1) * s


def mixes_two_heads(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + rotate_half(x.roll(1, 1)) * s


def transposes_inside(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + rotate_half(x.transpose(0, 1)) * s


def shifted_columns(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * c[..., :H] - b * s[..., H:], b * c[..., :H] + a * s[..., :H]), -1)


REASONS = {
    wrong_sign: "element 0 is x[0] * cos + x[8] * sin, a rotation has x[0] * cos - x[8] * sin there",
    sign_off_by_one: "element 1 is x[1] * cos + x[9] * sin",
}


@pytest.mark.parametrize(
    "spelling",
    [*REASONS, swapped_halves, other_pairing, mixes_two_heads, transposes_inside, shifted_columns],
)
def test_what_is_nearly_a_rotation_is_none(spelling) -> None:
    x = torch.randn(3, 3, 5, D)
    c, s = torch.randn(1, 1, 5, D), torch.randn(1, 1, 5, D)
    found = compiled(spelling, x, c, s)
    whole = [m for m in found.findings().of("rope") if m.node in next(iter(reversed(found.before.graph.nodes))).args[0]]
    assert not whole
    assert torch.equal(found.output, spelling(x, c, s)) or spelling is passes_the_first
    if spelling in REASONS:
        reasons = [miss.reason for miss in found.findings().near_misses() if miss.kind == "rope"]
        assert any(REASONS[spelling] in reason for reason in reasons), reasons


@st.composite
def random_spelling(draw: st.DrawFn):
    """One half rotation: operand orders, ways to cut and to turn, and a slot for one wrong sign."""
    cut = draw(st.sampled_from(["chunk", "split", "slice"]))
    add_first, cos_first, sin_first, negated = (draw(st.booleans()) for _ in range(4))
    wrong = draw(st.booleans())

    def spelling(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        a, b = {
            "chunk": lambda: x.chunk(2, -1),
            "split": lambda: x.split(H, dim=-1),
            "slice": lambda: (x[..., :H], x[..., H:]),
        }[cut]()
        turned = torch.cat((b, a if wrong else -a) if negated else (b if wrong else -b, a), -1)
        one = c * x if cos_first else x * c
        two = s * turned if sin_first else turned * s
        if negated:
            return one - two
        return two + one if add_first else one + two

    return spelling, wrong


@settings(max_examples=25, deadline=None)
@given(random_spelling())
def test_a_random_spelling_is_recognised_and_a_wrong_one_is_not(drawn) -> None:
    spelling, wrong = drawn
    found = compiled(spelling, *inputs())
    assert found.report.count("rope", backward=False) == (0 if wrong else 1)
    if not wrong:
        check(found, HALF)
