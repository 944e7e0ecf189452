"""What programs are made of, by kind: each fragment writes one as somebody might, every step a value of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attentions import BIASED, CAUSAL, GROUPED, ONE_KV_HEAD, PLAIN
from spellings import BARE, OFFSET, ROTATIONS, WEIGHTED

from .programs import Builder, Choices, Unfit

Fragment = Callable[[Builder, Choices], None]
EPS = ("1e-6", "1e-5", "1e-6", "0.1")


# Norms --------------------------------------------------------------------------------------------------------------


def _normed(b: Builder, c: Choices, x: str) -> str:
    """RMSNorm over the last axis of x."""
    n = b.of(x).shape[-1]
    if c.rarely(4):
        named = {"WEIGHTED": WEIGHTED, "OFFSET": OFFSET, "BARE": BARE}
        group = c.of(("WEIGHTED", "OFFSET", "BARE"))
        spelled = f"{group}[{c.of(list(named[group]))!r}]"
        return b.let(f"{spelled}({x})" if group == "BARE" else f"{spelled}({x}, {b.weight(c, (n,))})")
    wide = c.of((f"{x}.float()", f"{x}.to(torch.float32)", x, f"{x}.double()"))
    wide = wide if wide == x else b.let(wide)
    square = b.let(c.of((f"{wide}.pow(2)", f"{wide} * {wide}", f"torch.square({wide})", f"{wide} ** 2")))
    mean = c.of((f"{square}.mean(-1, keepdim=True)", f"{square}.sum(-1, keepdim=True) / {n}"))
    mean = b.let(mean)
    eps = c.of(EPS)
    if c.rarely(6):
        b.do(f"{mean}.add_({eps})")
        moved = mean
    else:
        moved = b.let(c.of((f"{mean} + {eps}", f"{eps} + {mean}", f"torch.add({mean}, {eps})")))
    how = c.number(4)
    if how == 3:
        y = b.let(f"{wide} / {moved}.sqrt()")
    else:
        scale = b.let((f"torch.rsqrt({moved})", f"{moved}.sqrt().reciprocal()", f"{moved} ** -0.5")[how])
        y = b.let(f"{wide} * {scale}")
    narrow = f".to({b.of(x).dtype})"
    order = c.number(5)
    if order == 4:
        return b.let(f"{y}{narrow}")
    w = b.weight(c, (n,))
    if order == 0:
        return b.let(f"{w} * {b.let(y + narrow)}")
    if order == 1:
        return b.let(f"({w} * {y}){narrow}")
    if order == 2:
        return b.let(f"({y} * (1.0 + {w}.float())){narrow}")
    return b.let(f"{y}{narrow} * (1 + {w})")


def rms_norm(b: Builder, c: Choices) -> None:
    b.main(_normed(b, c, b.state(c)))


def _sum(b: Builder, c: Choices) -> str:
    x = b.state(c)
    shape = b.of(x).shape
    other = b.value(
        c,
        lambda t: t.is_floating_point() and t.shape == shape and t is not b.of(x),
        lambda: b.input(c, tuple(shape), b.of(x).dtype),
    )
    if c.rarely(6):
        b.do(c.of((f"{x} += {other}", f"{x}.add_({other})")) if "." not in x else f"{x}.add_({other})")
        return x
    return b.let(c.of((f"{x} + {other}", f"torch.add({x}, {other})", f"{x}.add({other})")))


def add_rms_norm(b: Builder, c: Choices) -> None:
    total = _sum(b, c)
    b.main(_normed(b, c, total), *([total] if c.number(3) else []))


def norm_cast(b: Builder, c: Choices) -> None:
    y = _normed(b, c, _sum(b, c))
    wide = b.let(f"{y}.float()")
    router = b.new((b.of(y).shape[-1], 4), torch.float32, role="parameter")
    b.main(b.let(f"{wide} @ {router}"), *([y] if c.number(2) else []))


def norm_quant(b: Builder, c: Choices) -> None:
    x = b.input(c, (b.batch, b.tokens, c.of((64, 32, 48))), values="normal")
    if c.number(3):
        x = b.let(f"{x} + {b.input(c, tuple(b.of(x).shape), b.of(x).dtype)}")
        b.main(x)
    n, dtype = b.of(x).shape[-1], b.of(x).dtype
    w = b.new((n,), dtype, "around one", role="parameter")
    wide = b.let(f"{x}.float()")
    scale = b.let(f"torch.rsqrt({wide}.pow(2).mean(-1, keepdim=True) + 1e-6)")
    y = b.let(f"{w} * ({wide} * {scale}).to({dtype})")
    if c.rarely(5):
        b.main(y)
    if c.number(2):
        wide = b.let(f"{y}.float()")
        scale = b.let(f"{wide}.abs().amax(-1, keepdim=True) / 127")
        b.main(b.let(f"torch.round({wide} / {scale}).to(torch.int8)"), scale)
        return
    step = b.new(c.of(((1,), (n,))), dtype if dtype == torch.bfloat16 else torch.float32, "around one")
    step = b.let(f"{step} * 0.03")
    rounded = c.of((f"torch.round({y} / {step}).clamp(-128, 127)", f"({y} / {step}).clamp(-128, 127).round()"))
    b.main(b.let(f"({rounded}).to(torch.int8)"))


def group_norm_silu(b: Builder, c: Choices) -> None:
    x = b.input(c, (b.batch, 16, *c.of(((4, 5), (7,), (), (3, 2, 2)))))
    w, o = b.weight(c, (16,)), b.weight(c, (16,), "normal")
    if c.rarely(4):
        x = b.let(f"{x}.to(memory_format=torch.channels_last)")
    y = b.let(f"F.group_norm({x}, {c.of((4, 8, 16, 1))}, {w}, {o}, {c.of(EPS)})")
    b.main(b.let(c.of((f"F.silu({y})", f"{y} * torch.sigmoid({y})", f"F.silu({y}.clone(), inplace=True)"))))


# Rotations ----------------------------------------------------------------------------------------------------------


def _tables(
    b: Builder, c: Choices, rank: int, tokens_axis: int, tokens: int, width: int, full: bool
) -> tuple[str, str]:
    """cos and sin, that broadcast against a tensor of this rank."""
    angles = b.new((tokens, width // 2), torch.float32, "normal")
    dtype = c.of((b.dtype, b.dtype, torch.float32))
    doubled = full and c.number(4) != 3
    tables = []
    for function in ("cos", "sin"):
        table = b.let(f"{angles}.{function}().to({dtype})")
        if doubled:
            table = b.let(f"torch.cat(({table}, {table}), -1)")
        elif full:
            table = b.new((tokens, width), dtype)
        missing = rank - 2
        if missing == 2 and tokens_axis == 2:
            table = b.let(c.of((f"{table}[None, None]", f"{table}.unsqueeze(0).unsqueeze(0)", table)))
        elif missing == 2:
            table = b.let(c.of((f"{table}[None, :, None]", f"{table}.unsqueeze(0).unsqueeze(2)")))
        elif missing == 1:
            table = b.let(f"{table}.unsqueeze({1 if tokens_axis == 0 else 0})")
        tables.append(table)
    return tables[0], tables[1]


def _rotated(b: Builder, c: Choices, x: str, cos: str, sin: str, style: str, full: bool) -> str:
    if c.rarely(3):
        names = ROTATIONS[style, "full" if full else "half"]
        return b.let(f"ROTATIONS[{style!r}, {'full' if full else 'half'!r}][{c.of(list(names))!r}]({x}, {cos}, {sin})")
    n = b.of(x).shape[-1]
    half = n // 2
    cut = {
        "half": (f"{x}.chunk(2, -1)", f"{x}.split({half}, -1)", f"{x}[..., :{half}], {x}[..., {half}:]"),
        "interleave": (f"{x}[..., ::2], {x}[..., 1::2]", f"{x}.unflatten(-1, (-1, 2)).unbind(-1)"),
    }[style]
    first, second = b.lets(c.of(cut), 2)
    join = "torch.cat(({}, {}), -1)" if style == "half" else "torch.stack(({}, {}), -1).flatten(-2)"
    if full:
        turned = b.let(join.format(f"-{second}", first))
        return b.let(c.of((f"{x} * {cos} + {turned} * {sin}", f"{turned} * {sin} + {cos} * {x}")))
    one = b.let(f"{first} * {cos} - {second} * {sin}")
    two = b.let(c.of((f"{second} * {cos} + {first} * {sin}", f"{first} * {sin} + {second} * {cos}")))
    return b.let(join.format(one, two))


def _turned(b: Builder, c: Choices, x: str, *of: Any) -> str:
    """The rotation of x, mostly in the type of x."""
    y = _partly(b, c, x, *of)
    return b.let(f"{y}.to({b.of(x).dtype})") if b.of(y).dtype != b.of(x).dtype and c.number(4) != 3 else y


def _partly(b: Builder, c: Choices, x: str, cos: str, sin: str, style: str, full: bool, width: int) -> str:
    n = b.of(x).shape[-1]
    if width == n:
        return _rotated(b, c, x, cos, sin, style, full)
    part, rest = b.lets(c.of((f"{x}[..., :{width}], {x}[..., {width}:]", f"{x}.split([{width}, {n - width}], -1)")), 2)
    turned = _rotated(b, c, part, cos, sin, style, full)
    return b.let(f"torch.cat(({turned}, {rest}), -1)")


def rope(b: Builder, c: Choices) -> None:
    d = c.of((16, 32, 8, 12, 64, 2))
    layout = c.of(("BNSD", "BSND", "TND"))
    shape = {"BNSD": (b.batch, 4, b.tokens, d), "BSND": (b.batch, b.tokens, 4, d), "TND": (b.tokens, 4, d)}[layout]
    x = b.value(
        c,
        lambda t: t.is_floating_point() and t.dim() == len(shape) and t.shape[-1] % 2 == 0 and t.numel() > 0,
        lambda: b.input(c, shape),
    )
    axis = 2 if layout == "BNSD" else len(shape) - 3
    n = b.of(x).shape[-1]
    width = n // 2 if c.rarely(4) and n % 4 == 0 else n
    style, full = c.of(("half", "half", "interleave")), bool(c.number(2))
    full = full and not (style == "interleave" and c.rarely(2))
    cos, sin = _tables(b, c, len(shape), axis, b.tokens_of(x, axis), width, full)
    b.main(_turned(b, c, x, cos, sin, style, full, width))


def qk_rope(b: Builder, c: Choices) -> None:
    d, heads = c.of((16, 32, 64)), c.of((4, 2, 8))
    q = b.input(c, (b.batch, heads, b.tokens, d))
    k = b.input(c, (b.batch, c.of((1, 1, 1, 2)), b.tokens, d), b.of(q).dtype)
    style, full = c.of(("half", "interleave")), bool(c.number(2)) and not c.rarely(2)
    if c.rarely(3):  # looked up
        width = d if full else d // 2
        at = b.new((b.batch, b.tokens), torch.int64, "below 11")
        tables = []
        for _ in range(2):
            table = b.new((11, width), b.of(q).dtype, role="buffer")
            looked = b.let(c.of((f"{table}[{at}]", f"F.embedding({at}, {table})")))
            tables.append(b.let(f"{looked}.unsqueeze(1)"))
        cos, sin = tables
    else:
        cos, sin = _tables(b, c, 4, 2, b.tokens, d, full)
    b.main(*(_turned(b, c, x, cos, sin, style, full, d) for x in (q, k)))


def qkv(b: Builder, c: Choices) -> None:
    x = b.state(c)
    hidden, dtype = b.of(x).shape[-1], b.of(x).dtype
    heads, kv_heads, d = c.of((4, 2)), c.of((2, 1)), c.of((16, 32, 12, 8))
    q_size, kv_size = heads * d, kv_heads * d
    has_bias = c.rarely(4)

    def projected(size: int) -> str:
        weight = b.matrix(c, size, hidden, dtype)
        bias = f", {b.new((size,), dtype, role='parameter')}" if has_bias else ""
        return b.let(c.of((f"F.linear({x}, {weight}{bias})", f"F.linear({x}, {weight}{bias})", f"{x} @ {weight}.T")))

    if c.number(2):
        whole = projected(q_size + 2 * kv_size)
        split = f"{whole}.split([{q_size}, {kv_size}, {kv_size}], -1)"
        q, k, v = b.lets(split, 3)
    else:
        q, k, v = projected(q_size), projected(kv_size), projected(kv_size)
    rank = b.of(x).dim()
    lead = ", ".join(f"{x}.shape[{i}]" for i in range(rank - 1))
    normed, when = c.of((True, True, False)), c.of(("after", "before", "never"))
    over_all = normed and c.rarely(5)
    full = bool(c.number(2))
    style = c.of(("half", "half", "interleave"))
    width = d // 2 if c.rarely(4) and d % 4 == 0 else d
    turned = when != "never" and rank == 3
    tokens_axis = (2 if turned else 1) if rank == 3 else 0
    cos, sin = _tables(b, c, rank + 1, tokens_axis, b.tokens_of(x, -2), width, full)
    norm_at = bytes(c.number(256) for _ in range(12))
    rope_at = bytes(c.number(256) for _ in range(6))
    results = []
    for value, count in ((q, heads), (k, kv_heads), (v, kv_heads)):
        if over_all and value != v:
            value = _normed(b, Choices(norm_at), value)
        value = b.let(c.of((f"{value}.view({lead}, {count}, {d})", f"{value}.unflatten(-1, ({count}, {d}))")))
        if when == "before" and turned:
            value = b.let(f"{value}.transpose(1, 2)")
        if normed and not over_all and count and len(results) < 2:
            value = _normed(b, Choices(norm_at), value)
        if when == "after" and turned:
            value = b.let(f"{value}.transpose(1, 2)")
        if len(results) < 2:
            value = _turned(b, Choices(rope_at), value, cos, sin, style, full, width)
        results.append(value)
    b.main(*results)
    if turned:
        b.heads.append((results[0], results[1], results[2]))


# Units --------------------------------------------------------------------------------------------------------------


def glu(b: Builder, c: Choices) -> None:
    form = c.of(("separate", "one projection", "cut", "given"))
    x = b.state(c)
    n, dtype = b.of(x).shape[-1], b.of(x).dtype
    wide = c.of((24, 32, 16))
    if form == "separate":
        gate, up = (b.let(f"F.linear({x}, {b.matrix(c, wide, n, dtype)})") for _ in range(2))
    elif form == "given":
        gate, up = x, b.input(c, tuple(b.of(x).shape), dtype)
    else:
        whole = b.let(f"F.linear({x}, {b.matrix(c, 2 * wide, n, dtype)})") if form == "one projection" else x
        half = b.of(whole).shape[-1] // 2
        cuts = (f"{whole}.chunk(2, -1)", f"{whole}.split({half}, -1)", f"{whole}[..., :{half}], {whole}[..., {half}:]")
        gate, up = b.lets(c.of(cuts), 2)
        if c.rarely(4):
            gate, up = up, gate
    activation = c.of(("F.silu({})", "{0} * torch.sigmoid({0})", "F.gelu({})", "F.gelu({}, approximate='tanh')"))
    if c.rarely(4):
        others = ("F.silu({}.float())", "F.relu({})", "{0}.float().sigmoid() * {0}", "F.silu({}, inplace=True)")
        activation = c.of(others)
    if "gelu" in activation and not b.of(gate).isfinite().all():
        activation = "F.silu({})"  # torch's own gelu of infinity is NaN or not, by the type and place of the element
    active = b.let(activation.format(gate))
    y = b.let(c.of((f"{active} * {up}", f"{up} * {active}", f"({active} * {up}).to({dtype})")))
    if c.rarely(3):
        down = b.matrix(c, n, b.of(y).shape[-1], b.of(y).dtype)
        y = b.let(f"F.linear({y}, {down})")
    b.main(y)


def fast_gelu(b: Builder, c: Choices) -> None:
    x = b.state(c)
    b.main(b.let(c.of((f"{x} * torch.sigmoid(1.702 * {x})", f"torch.sigmoid({x} * 1.702) * {x}"))))


def clipped_swiglu(b: Builder, c: Choices) -> None:
    x = b.input(c, (b.batch, b.tokens, c.of((32, 16, 12))), values="wide")
    n = b.of(x).shape[-1]
    gate, up = b.lets(c.of((f"{x}[..., ::2], {x}[..., 1::2]", f"{x}.chunk(2, -1)")), 2)
    limit = c.of(("7.0", "3.0"))
    if n and c.rarely(4):
        gate, up = b.let(f"{gate}.clone()"), b.let(f"{up}.clone()")
        b.do(f"{gate}.clamp_(max={limit})")
        b.do(f"{up}.clamp_(-{limit}, {limit})")
    else:
        gate = b.let(f"{gate}.clamp(max={limit})")
        up = b.let(f"{up}.clamp(-{limit}, {limit})")
    active = b.let(f"{gate} * torch.sigmoid({gate} * 1.702)")
    b.main(b.let(c.of((f"({up} + 1) * {active}", f"{active} * ({up} + 1.0)"))))


def transpose_batchmatmul(b: Builder, c: Choices) -> None:
    second = bool(c.number(2))
    x = b.input(c, (b.tokens, 4, 128) if second else (4, b.tokens, 128))
    w = b.new((4, 128, 128), b.of(x).dtype, role="parameter")
    first = b.let(f"{x}.transpose(0, 1)") if second else x
    product = b.let(c.of((f"torch.bmm({first}, {w})", f"{first} @ {w}")))
    turned = b.let(f"{product}.transpose(0, 1)")
    flat = f"{turned}.reshape({turned}.shape[0], -1)"
    b.main(b.let(c.of((f"{turned}.contiguous()", f"{turned}.flatten(1)", flat, turned))))


# Experts ------------------------------------------------------------------------------------------------------------


def moe_gating(b: Builder, c: Choices) -> None:
    logits = b.input(c, (b.batch * b.tokens, c.of((16, 8))), values="normal")
    k = c.of((4, 2, 1))
    wide = f"F.softmax({logits}, dim=-1, dtype=torch.float)"
    scores = b.let(c.of((wide, f"{logits}.softmax(-1)", f"{logits}.float().softmax(-1)")))
    weights, experts = b.lets(f"torch.topk({scores}, {k}, dim=-1)", 2)
    if c.rarely(4):
        weights = b.let(f"{weights} / {weights}.sum(-1, keepdim=True)")
    if c.number(2):
        weights = b.let(f"{weights}.to({b.of(logits).dtype})")
    b.main(weights, experts)


def grouped_moe_gating(b: Builder, c: Choices) -> None:
    tokens = b.batch * b.tokens
    logits = b.input(c, (tokens, 16), values="normal")
    bias = b.new((16,), torch.float32, role="buffer")
    scores = b.let(c.of((f"{logits}.float().sigmoid()", f"torch.sigmoid({logits})")))
    choice = b.let(f"{scores} + {bias}") if c.number(4) != 3 else scores
    if c.number(2):
        by = c.of((f"{choice}.view(-1, 4, 4).topk(2, dim=-1)[0].sum(-1)", f"{choice}.view(-1, 4, 4).amax(-1)"))
        group_scores = b.let(by)
        best = b.let(f"torch.topk({group_scores}, 2, dim=-1)[1]")
        mask = b.let(f"torch.zeros_like({group_scores}).scatter_(1, {best}, 1)")
        mask = b.let(f"{mask}.unsqueeze(-1).expand(-1, 4, 4).reshape(-1, 16)")
        choice = b.let(f"{choice}.masked_fill(~{mask}.bool(), {c.of(('-math.inf', '0.0'))})")
    experts = b.let(f"torch.topk({choice}, 3, dim=-1).indices")
    weights = b.let(f"{scores}.gather(1, {experts})")
    if c.number(4) != 3:
        eps = c.of((" + 1e-20", ""))
        weights = b.let(f"{weights} / ({weights}.sum(-1, keepdim=True){eps})")
    b.main(b.let(f"{weights} * 2.5") if c.number(2) else weights, experts)


# Attention ----------------------------------------------------------------------------------------------------------


def _qkv(b: Builder, c: Choices) -> tuple[str, str, str]:
    if b.heads and c.number(3) != 2:
        return b.heads[-1]
    heads, kv_heads = c.of(((4, 4), (4, 2), (4, 1), (2, 2)))
    d, keys = c.of((16, 32, 64, 7)), c.of((b.tokens, b.tokens, b.tokens + 2, 1))
    q = b.input(c, (b.batch, heads, b.tokens, d), values=c.of(("normal", "normal", "wide")))
    dtype = b.of(q).dtype
    by_token = c.rarely(4)
    shape = (b.batch, keys, kv_heads, d) if by_token else (b.batch, kv_heads, keys, d)
    k, v = (b.new(shape, dtype, layout=c.of(("contiguous", "contiguous", "transposed", "padded"))) for _ in range(2))
    if by_token:
        k, v = (b.let(f"{name}.transpose(1, 2)") for name in (k, v))
    return q, k, v


def _mask_shapes(heads: int, batch: int, queries: int, keys: int) -> tuple[tuple[int, ...], ...]:
    return (batch, 1, queries, keys), (queries, keys), (1, heads, queries, keys)


def attention(b: Builder, c: Choices) -> None:
    q, k, v = _qkv(b, c)
    (_, heads, _, d), (_, kv_heads, _, _) = b.of(q).shape, b.of(k).shape
    batch, queries, keys = f"{q}.shape[0]", f"{q}.shape[2]", f"{k}.shape[2]"
    sizes = b.of(q).shape[0], b.tokens_of(q, 2), b.tokens_of(k, 2)
    if b.of(q).dtype != b.of(k).dtype or heads % kv_heads:
        raise Unfit
    if c.rarely(4):
        groups = {"PLAIN": PLAIN, "CAUSAL": CAUSAL, "GROUPED": GROUPED, "ONE_KV_HEAD": ONE_KV_HEAD, "BIASED": BIASED}
        fitting = [name for name, fits in {
            "PLAIN": heads == kv_heads,
            "CAUSAL": heads == kv_heads,
            "GROUPED": heads == 2 * kv_heads,
            "ONE_KV_HEAD": kv_heads == 1,
            "BIASED": heads == kv_heads,
        }.items() if fits]
        group = c.of(fitting or [""])
        if not group:
            raise Unfit
        call = f"{group}[{c.of(list(groups[group]))!r}]" + ("[0]" if group == "CAUSAL" else "")
        bias = f", {b.new((heads, *sizes[1:]), b.of(q).dtype)}" if group == "BIASED" else ""
        b.main(b.let(f"{call}({q}, {k}, {v}{bias})"))
        return
    if heads != kv_heads and c.number(2):
        times = heads // kv_heads
        repeat = c.of((
            f".repeat_interleave({times}, 1)",
            f"[:, :, None].expand(-1, -1, {times}, -1, -1).reshape({batch}, {heads}, -1, {d})",
        ))
        k, v = (b.let(f"{name}{repeat}") for name in (k, v))
        kv_heads = heads
    form = c.of(("causal", "none", "bool", "added", "window", "padding", "lowest"))
    mask = ""
    row, column = f"torch.arange({queries})[:, None]", f"torch.arange({keys})"
    if form == "causal":
        mask = b.let(c.of((
            f"torch.ones({queries}, {keys}, dtype=torch.bool).tril({keys} - {queries})",
            f"{column} <= {row} + ({keys} - {queries})",
            f"{column} <= {row}",
        )))
    elif form == "window":
        mask = b.let(f"({column} <= {row}) & ({column} > {row} - {c.of((3, 2, 1))})")
    elif form == "bool":
        mask = b.new(c.of(_mask_shapes(heads, *sizes)), torch.bool, "bool")
    elif form == "padding":
        mask = b.let(f"{b.new((sizes[0], sizes[2]), torch.bool, 'bool')}[:, None, None, :]")
    elif form == "lowest":
        seen = b.let(f"{column} <= {row}")
        lowest = f"torch.finfo({b.of(q).dtype}).min"
        mask = b.let(f"torch.zeros({queries}, {keys}, dtype={b.of(q).dtype}).masked_fill(~{seen}, {lowest})")
    elif form == "added":
        mask = b.new(c.of(_mask_shapes(heads, *sizes)), b.of(q).dtype)
    if c.number(2) or heads != kv_heads:
        given = f", attn_mask={mask}" if mask else ", is_causal=True" if c.rarely(3) else ""
        given += f", scale={c.of(('0.3', '0.125'))}" if c.number(2) else ""
        given += ", enable_gqa=True" if heads != kv_heads else ""
        y = b.let(f"F.scaled_dot_product_attention({q}, {k}, {v}{given})")
    else:
        scale = c.of(("0.3", "0.25", f"{d ** -0.5!r}"))
        scores = b.let(c.of((f"{q} @ {k}.transpose(-1, -2) * {scale}", f"torch.matmul({q} * {scale}, {k}.mT)")))
        if mask and b.of(mask).dtype == torch.bool:
            scores = b.let(c.of((
                f"{scores}.masked_fill(~{mask}, -math.inf)",
                f"torch.where({mask}, {scores}, -math.inf)",
                f"{scores}.masked_fill(~{mask}, torch.finfo({b.of(scores).dtype}).min)",
            )))
        elif mask:
            scores = b.let(f"{scores} + {mask}")
        weights = b.let(c.of((
            f"F.softmax({scores}, dim=-1, dtype=torch.float32).to({b.of(q).dtype})",
            f"{scores}.softmax(-1)",
        )))
        y = b.let(c.of((f"{weights} @ {v}", f"torch.matmul({weights}, {v})")))
    if c.number(3) == 2:
        y = b.let(f"{y}.transpose(1, 2).flatten(2)")
    b.main(y)


def paged_attention(b: Builder, c: Choices) -> None:
    dtype = c.of((torch.float16, torch.bfloat16))
    q = b.new((2, 4, c.of((1, 5)), 64), dtype)
    k, v = (b.new((5, 128, 2, 64), dtype, role=c.of(("argument", "buffer"))) for _ in range(2))
    table = b.new((2, 2), torch.int32, "distinct below 5")
    keys = []
    for cache in (k, v):
        gathered = b.let(c.of((f"{cache}[{table}]", f"{cache}[{table}.long()]")))
        keys.append(b.let(f"{gathered}.flatten(1, 2).transpose(1, 2)"))
    b.main(b.let(f"F.scaled_dot_product_attention({q}, {keys[0]}, {keys[1]}, enable_gqa=True)"))


# Caches and states --------------------------------------------------------------------------------------------------


def _dtype16(b: Builder) -> torch.dtype:
    return b.dtype if b.dtype.itemsize == 2 else torch.float16


def kv_cache_write(b: Builder, c: Choices) -> None:
    dtype, heads, d, blocks, size = _dtype16(b), 2, c.of((32, 16, 24)), 3, c.of((16, 4))
    n = b.tokens
    role = c.of(("argument", "buffer"))
    caches = [b.new((blocks, size, heads, d), dtype, role=role) for _ in range(2)]
    slots = b.new((n,), c.of((torch.int64, torch.int32)), f"distinct below {blocks * size}")
    form = c.of(("flat", "blocks", "index_put", "index_copy"))
    if form == "index_copy" and b.of(slots).dtype == torch.int32:
        slots = b.let(f"{slots}.long()")
    for cache in caches:
        tokens = b.value(
            c,
            lambda t: t.shape == (n, heads, d) and t.dtype == dtype,
            lambda: b.input(c, (n, heads, d), dtype),
        )
        flat = f"{cache}.view(-1, {heads}, {d})"
        b.do({
            "flat": f"{flat}[{slots}] = {tokens}",
            "blocks": f"{cache}[{slots} // {size}, {slots} % {size}] = {tokens}",
            "index_put": f"{cache}.flatten(0, 1).index_put_(({slots},), {tokens})",
            "index_copy": f"{flat}.index_copy_(0, {slots}, {tokens})",
        }[form])
    if c.number(2):
        b.main(b.let(f"{caches[0]}[1] + {caches[1]}[1]"))
    b.main(*(cache for cache in caches if c.rarely(4)))


def latent_cache_write(b: Builder, c: Choices) -> None:
    dtype, n = _dtype16(b), b.tokens
    x = b.new((n, 576), dtype)
    latent, k = b.lets(f"{x}.split([512, 64], -1)", 2)
    w = b.new((512,), dtype, "around one", role="parameter")
    wide = b.let(f"{latent}.float()")
    y = b.let(f"{w} * ({wide} * torch.rsqrt({wide}.pow(2).mean(-1, keepdim=True) + 1e-6)).to({dtype})")
    y, k = b.let(f"{y}.unsqueeze(1)"), b.let(f"{k}.unsqueeze(1)")
    angles = b.new((n, 32), torch.float32)
    halves = (f"{angles}.cos()", f"{angles}.sin()")
    cos, sin = (b.let(f"torch.cat(({half}, {half}), -1).to({dtype}).unsqueeze(1)") for half in halves)
    apart = b.let(f"{k}.unflatten(-1, (-1, 2)).transpose(-1, -2).reshape({k}.shape)")
    first, second = b.lets(f"{apart}.chunk(2, -1)", 2)
    turned = b.let(f"{apart} * {cos} + torch.cat((-{second}, {first}), -1) * {sin}")
    slots = b.new((n,), torch.int64, "distinct below 48")
    for tokens, width in ((y, 512), (turned, 64)):
        cache = b.new((3, 16, 1, width), dtype, role=c.of(("argument", "buffer")))
        b.do(f"{cache}.view(-1, 1, {width})[{slots}] = {tokens}")
        if c.rarely(3):
            b.main(b.let(f"{cache}[0]"))


def causal_conv1d(b: Builder, c: Choices) -> None:
    channels, width, tokens = c.of((16, 32, 12)), c.of((4, 3, 2)), b.tokens
    dtype = b.dtype if c.rarely(4) else _dtype16(b)
    x = b.new((b.batch, tokens, channels), dtype) if c.number(2) else ""
    x = b.let(f"{x}.transpose(1, 2)") if x else b.input(c, (b.batch, channels, tokens), dtype)
    dtype = b.of(x).dtype
    w = b.new((channels, 1, width), dtype, role="parameter")
    bias = b.new((channels,), dtype, role="parameter") if c.number(2) else "None"
    conv = f"F.conv1d({{}}, {w}, {bias}, padding={{}}, groups={channels})"
    form = c.of(("prefill", "padded", "state", "state", "kept"))
    if form == "prefill":
        y = b.let(f"{b.let(conv.format(x, width - 1))}[..., :{x}.shape[-1]]")
    elif form == "padded":
        y = b.let(conv.format(b.let(f"F.pad({x}, ({width - 1}, 0))"), 0))
    else:
        length = c.of((width - 1, width))
        layout, role = c.of(("pool", "pool", "contiguous")), c.of(("buffer", "argument"))
        state = b.new((b.batch, channels, length), dtype, "normal", layout, role)
        if form == "state":
            seen = b.let(f"torch.cat([{state}, {x}], -1)")
            b.do(c.of((f"{state}.copy_({seen}[..., -{length}:])", f"{state}[:] = {seen}[:, :, -{length}:]")))
            y = b.let(f"{b.let(conv.format(seen, 0))}[..., -{x}.shape[-1]:]")
        else:
            b.do(f"{state}.copy_(F.pad({x}, ({length}, 0))[..., -{length}:])")
            y = b.let(f"{b.let(conv.format(x, width - 1))}[..., :{x}.shape[-1]]")
    if c.number(3):
        y = b.let(c.of((f"F.silu({y})", f"{y} * torch.sigmoid({y})")))
    if c.number(2):
        y = b.let(f"{y}.transpose(1, 2)")
    b.main(y)


KINDS: Mapping[str, Fragment] = {
    f.__name__: f
    for f in (
        rms_norm,
        add_rms_norm,
        norm_cast,
        norm_quant,
        group_norm_silu,
        rope,
        qk_rope,
        qkv,
        glu,
        fast_gelu,
        clipped_swiglu,
        transpose_batchmatmul,
        moe_gating,
        grouped_moe_gating,
        attention,
        paged_attention,
        kv_cache_write,
        latent_cache_write,
        causal_conv1d,
    )
}
