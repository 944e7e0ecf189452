"""Projection, split, norm and rotation of q and k become one op, for every layout that a model keeps them in."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from helpers import compiled

Tensor = torch.Tensor
OP = "sgl_kernel_npu::split_qkv_rmsnorm_rope"


def llama_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gemma_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w.float())).to(x.dtype)


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@dataclass(frozen=True)
class Form:
    """How an attention prologue is written."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rope_dim: int = 16
    fused: bool = False
    bias: bool = False
    norm: object = llama_norm
    eps: float = 1e-6
    transpose: str = "after"  # where heads come in front of tokens: before the norm, after it, or never
    batched: bool = True


class Prologue(nn.Module):
    def __init__(self, form: Form, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.form = form
        q, kv = form.heads * form.head_dim, form.kv_heads * form.head_dim
        if form.fused:
            self.qkv = nn.Linear(32, q + 2 * kv, bias=form.bias, dtype=dtype)
        else:
            self.q, self.k, self.v = (nn.Linear(32, n, bias=form.bias, dtype=dtype) for n in (q, kv, kv))
        self.q_norm, self.k_norm = (nn.Parameter(torch.rand(form.head_dim, dtype=dtype) + 0.5) for _ in range(2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.form.fused:
            return self.q(x), self.k(x), self.v(x)
        q, kv = self.form.heads * self.form.head_dim, self.form.kv_heads * self.form.head_dim
        return self.qkv(x).split([q, kv, kv], -1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        r = self.form.rope_dim
        y = half(x[..., :r], cos, sin)
        return y if r == self.form.head_dim else torch.cat((y, x[..., r:]), -1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x)
        outputs = []
        axis = 1 if self.form.batched else 0
        cos, sin = (t.unsqueeze(axis if self.form.transpose != "never" else -2) for t in (cos, sin))
        for value, weight in ((q, self.q_norm), (k, self.k_norm)):
            value = value.view(*x.shape[:-1], -1, self.form.head_dim)
            if self.form.transpose == "before":
                value = value.transpose(axis, axis + 1)
            if self.form.norm is not None:
                value = self.form.norm(value, weight, self.form.eps)
            if self.form.transpose == "after":
                value = value.transpose(axis, axis + 1)
            outputs.append(self.rotate(value, cos, sin))
        return outputs[0], outputs[1], v


def inputs(form: Form, dtype: torch.dtype = torch.float32, batch: int = 2, table_batch: int = 1) -> tuple[Tensor, ...]:
    tokens = 5
    angles = torch.rand(table_batch, tokens, form.rope_dim // 2) * 3
    angles = torch.cat((angles, angles), -1)
    x = torch.randn(batch, tokens, 32, dtype=dtype)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return (x, cos, sin) if form.batched else (x[0], cos[0], sin[0])


def check(form: Form, arguments: tuple[Tensor, ...], dtype: torch.dtype = torch.float32, **settings) -> object:
    model = Prologue(form, dtype)
    with torch.no_grad():
        wanted = model(*arguments)
    found = compiled(model, *arguments, **settings)
    assert found.report.ops == {OP: 1}, str(found.report)
    bound = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for value, expected in zip(found.output, wanted, strict=True):
        torch.testing.assert_close(value, expected, atol=bound, rtol=bound)
        assert value.stride() == expected.stride()
    return found


FORMS = {
    "qwen3": Form(),
    "bias": Form(bias=True),
    "one projection": Form(fused=True),
    "one projection with bias": Form(fused=True, bias=True),
    "no norm": Form(norm=None),
    "gemma": Form(norm=gemma_norm, kv_heads=1),
    "equal widths": Form(kv_heads=4),
    "partial": Form(rope_dim=8),
    "norm after transpose": Form(transpose="before"),
    "tokens first": Form(transpose="never"),
    "flat": Form(batched=False, transpose="never"),
    "flat and transposed": Form(batched=False, fused=True),
    "one head": Form(heads=1, kv_heads=1),
    "other eps": Form(eps=1e-3),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_every_form_is_one_op(name: str, dynamic: bool | None) -> None:
    form = FORMS[name]
    report = check(form, inputs(form), dynamic=dynamic).report
    assert report.count("qkv", style="fused" if form.fused else "separate") == 1
    assert report.count("rope") == 2
    assert report.count("norm_rope_chain", per_head=True) == (2 if form.norm else 0)
    assert all(site.status == "lowered" and site.op == OP for site in report.sites)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "gemma", "no norm", "one projection"])
def test_in_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    report = check(FORMS[name], inputs(FORMS[name], dtype), dtype).report
    qkv = next(site for site in report.sites if site.kind == "qkv")
    assert "rounds once" in qkv.roundings[-1]


@pytest.mark.parametrize(("batch", "table_batch"), [(1, 1), (2, 1), (2, 2), (3, 3)])
def test_tables_for_one_batch_or_for_each(batch: int, table_batch: int) -> None:
    form = Form()
    check(form, inputs(form, batch=batch, table_batch=table_batch))


def test_wide_tables_stay_wide() -> None:
    class Olmo(Prologue):
        def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return half(x, cos, sin).to(x.dtype)

    form = Form()
    x, cos, sin = inputs(form, torch.bfloat16)
    model = Olmo(form, torch.bfloat16)
    arguments = (x, cos.float(), sin.float())
    with torch.no_grad():
        wanted = model(*arguments)
    found = compiled(model, *arguments)
    assert found.report.ops == {OP: 1}
    for value, expected in zip(found.output, wanted, strict=True):
        torch.testing.assert_close(value, expected, atol=6e-2, rtol=6e-2)


def test_q_k_and_v_are_one_matmul_and_fresh_weights_are_seen() -> None:
    form = Form()
    model, arguments = Prologue(form), inputs(form, batch=1)
    found = compiled(model, *arguments)
    assert sum("linear" in target for target in found.targets()) == 1
    assert found.report.launches_after == 2
    with torch.no_grad():
        model.k.weight.mul_(-2)
        model.v.load_state_dict({"weight": torch.randn_like(model.v.weight)})
        for value, expected in zip(found.function(*arguments), model(*arguments), strict=True):
            torch.testing.assert_close(value, expected)


def test_other_tokens_take_no_new_compilation() -> None:
    form = Form()
    model = Prologue(form)
    found = compiled(model, *inputs(form), dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (4, 3):
            arguments = inputs(form, batch=batch)
            for value, expected in zip(found.function(*arguments), model(*arguments), strict=True):
                torch.testing.assert_close(value, expected)


def test_a_normed_q_that_is_used_elsewhere_is_normed_on_its_own_too() -> None:
    class Model(Prologue):
        def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            self.seen.append(x.exp())
            return half(x, cos, sin)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            self.seen = []
            outputs = super().forward(x, cos, sin)
            return (*outputs, *self.seen)

    form = Form()
    model, arguments = Model(form), inputs(form)
    with torch.no_grad():
        wanted = model(*arguments)
    found = compiled(model, *arguments)
    assert found.report.ops[OP] == 1
    assert found.report.ops["npu::npu_rms_norm"] == 2
    for value, expected in zip(found.output, wanted, strict=True):
        torch.testing.assert_close(value, expected)


REFUSED = {
    "head_dim 24": (Form(head_dim=24, rope_dim=24), {}, "24"),
    "three heads to two": (Form(heads=3, kv_heads=2), {}, "no multiple"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_does_not_do_is_refused(name: str) -> None:
    form, settings, reason = REFUSED[name]
    model, arguments = Prologue(form), inputs(form)
    found = compiled(model, *arguments, **settings)
    assert OP not in found.report.ops
    qkv = next(site for site in found.report.sites if site.kind == "qkv")
    assert reason in qkv.reason
    chain = next(site for site in found.report.sites if site.kind == "norm_rope_chain")
    assert chain.reason == qkv.reason
    with torch.no_grad():
        for value, expected in zip(found.output, model(*arguments), strict=True):
            torch.testing.assert_close(value, expected)


def test_two_eps_are_refused() -> None:
    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            eps = iter((1e-6, 1e-3))
            self.form = replace(self.form, norm=lambda v, w, _: llama_norm(v, w, next(eps)))
            return super().forward(x, cos, sin)

    form = Form()
    found = compiled(Model(form), *inputs(form))
    assert OP not in found.report.ops
    assert any("different eps: 1e-06 and 0.001" in (site.reason or "") for site in found.report.sites)


@pytest.mark.parametrize("width", [32, 8])
def test_a_norm_over_some_heads_or_a_part_of_one_is_refused(width: int) -> None:
    class Grouped(Prologue):
        def __init__(self, form: Form) -> None:
            super().__init__(form)
            self.weight = nn.Parameter(torch.rand(width) + 0.5)

        def project(self, x: Tensor):
            q, k, v = super().project(x)
            return *(llama_norm(t.unflatten(-1, (-1, width)), self.weight, 1e-6).flatten(-2) for t in (q, k)), v

    form = Form(norm=None, kv_heads=4)
    reasons = refused(Grouped(form), inputs(form))
    assert reasons == [
        f"the norm of q is over {width} elements; ops norm per head of 16, or both q and k over all heads together"
    ]


@pytest.mark.parametrize("order", ["kqv", "vqk", "qvk", "gap"])
def test_other_orders_of_columns_are_refused(order: str) -> None:
    class Model(Prologue):
        def __init__(self, form: Form) -> None:
            super().__init__(form)
            self.qkv = nn.Linear(32, 64 + 2 * 32 + (16 if order == "gap" else 0))

        def project(self, x: Tensor):
            widths = {"q": 64, "k": 32, "v": 32}
            if order == "gap":
                q, k, v, _ = self.qkv(x).split([64, 32, 32, 16], -1)
                return q, k, v
            parts = dict(zip(order, self.qkv(x).split([widths[name] for name in order], -1), strict=True))
            return parts["q"], parts["k"], parts["v"]

    form = Form(fused=True)
    model, arguments = Model(form), inputs(form)
    found = compiled(model, *arguments)
    assert OP not in found.report.ops
    qkv = next(site for site in found.report.sites if site.kind == "qkv")
    assert "the op wants rows [q | k | v]" in qkv.reason
    with torch.no_grad():
        for value, expected in zip(found.output, model(*arguments), strict=True):
            torch.testing.assert_close(value, expected)


def test_the_rows_of_q_may_not_be_interleaved_with_those_of_k() -> None:
    class GptNeoX(Prologue):
        def project(self, x: Tensor):
            per_head = self.qkv(x).view(*x.shape[:-1], 4, 48)
            return tuple(part.reshape(*x.shape[:-1], 64) for part in per_head.chunk(3, -1))

    form = Form(fused=True, kv_heads=4, norm=None)
    model, arguments = GptNeoX(form), inputs(form)
    found = compiled(model, *arguments)
    assert OP not in found.report.ops
    with torch.no_grad():
        for value, expected in zip(found.output, model(*arguments), strict=True):
            torch.testing.assert_close(value, expected)


def test_rotation_before_norm_is_not_the_ops_order() -> None:
    class HunYuan(Prologue):
        def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return llama_norm(half(x, cos, sin), self.q_norm, 1e-6)

    form = Form(norm=None)
    model, arguments = HunYuan(form), inputs(form)
    found = compiled(model, *arguments)
    assert found.report.count("rope_then_norm") == 2
    assert found.report.ops == {OP: 1, "npu::npu_rms_norm": 2}
    site = next(site for site in found.report.sites if site.kind == "rope_then_norm")
    assert "the norm comes after the rotation" in site.reason
    with torch.no_grad():
        for value, expected in zip(found.output, model(*arguments), strict=True):
            torch.testing.assert_close(value, expected)


def refused(model: nn.Module, arguments: tuple[Tensor, ...]) -> list[str]:
    """Checks that no prologue is fused and the numbers are eager's; returns the reasons given."""
    with torch.no_grad():
        wanted = model(*arguments)
    found = compiled(model, *arguments)
    assert OP not in found.report.ops, str(found.report)
    for value, expected in zip(found.output, wanted, strict=True):
        torch.testing.assert_close(value, expected)
    return [site.reason for site in found.report.sites if site.kind == "qkv"]


def test_q_and_k_of_two_styles_are_no_prologue() -> None:
    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            self.turn = iter((half, interleaved))
            return super().forward(x, cos, sin)

        def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return next(self.turn)(x, cos[..., :8], sin[..., :8])

    def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    form = Form()
    refused(Model(form), inputs(form))


def test_one_table_that_turns_q_by_token_and_k_by_head_is_refused() -> None:
    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            q, k, v = (value.view(2, 5, 5, 16) for value in self.project(x))
            return half(q, cos, sin), half(k.transpose(1, 2), cos, sin), v

    form = Form(heads=5, kv_heads=5)
    x, cos, sin = inputs(form)
    reasons = refused(Model(form), (x, cos.unsqueeze(2), sin.unsqueeze(2)))
    assert any("differs from head to head" in reason for reason in reasons)


def test_rows_normed_across_two_heads_are_refused() -> None:
    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            outputs = []
            for value in self.project(x)[:2]:
                rows = torch.cat((value[..., 8:], value[..., :8]), -1).view(2, 5, -1, 16)
                shifted = llama_norm(rows, self.q_norm, 1e-6).flatten(-2)
                heads = torch.cat((shifted[..., -8:], shifted[..., :-8]), -1).view(2, 5, -1, 16)
                outputs.append(half(heads, cos, sin))
            return outputs

    form = Form()
    x, cos, sin = inputs(form)
    refused(Model(form), (x, cos.unsqueeze(2), sin.unsqueeze(2)))


def test_rows_normed_off_the_heads_by_a_slice_are_refused() -> None:
    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            outputs = []
            for value in self.project(x)[:2]:
                rows = llama_norm(value[..., 8:-8].unflatten(-1, (-1, 16)), self.q_norm, 1e-6).flatten(-2)
                outputs.append(half(rows[..., 8:-8].unflatten(-1, (-1, 16)), cos, sin))
            return outputs

    form = Form(heads=6, kv_heads=6)
    x, cos, sin = inputs(form)
    refused(Model(form), (x, cos.unsqueeze(2), sin.unsqueeze(2)))


def test_a_rounding_on_the_way_to_a_wide_result_is_refused() -> None:
    class Model(Prologue):
        def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return half(x.to(torch.bfloat16).float(), cos, sin)

    form = Form()
    assert any("rounds to torch.bfloat16 on the way" in reason for reason in refused(Model(form), inputs(form)))


def test_v_may_be_used_before_the_rotation_can_be_computed() -> None:
    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            early = self.v(x).exp()
            cos, sin = cos + early.mean() * 0, sin
            q, k, v = super().forward(x, cos, sin)
            return q, k, v, early

    form = Form()
    assert any("depends on its result" in reason for reason in refused(Model(form), inputs(form)))


def test_a_projection_that_is_called_twice_is_not_taken_apart() -> None:
    class Model(Prologue):
        def project(self, x: Tensor):
            return self.q(x), self.k(x), self.k(x)

    form = Form(heads=2, kv_heads=2)
    model, arguments = Model(form), inputs(form)
    with torch.no_grad():
        wanted = model(*arguments)
    found = compiled(model, *arguments)
    for value, expected in zip(found.output, wanted, strict=True):
        torch.testing.assert_close(value, expected)
