"""What other compilers and kernels got wrong, by the public report: each is run as reported, and must be as eager.

Most are the prologue of attention with one detail changed. All sizes are small, and all inputs differ per element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

import npu_fuse
from helpers import Compiled, compiled

Tensor = torch.Tensor
HEAD_DIM, HEADS, KV_HEADS, HIDDEN, TOKENS = 16, 4, 2, 32, 5
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
PROLOGUE = "sgl_kernel_npu::split_qkv_rmsnorm_rope"


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


class Prologue(nn.Module):
    """One fused projection, per-head norms, rotation. What a report changes is given as a method of a subclass."""

    width = Q + 2 * KV

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(HIDDEN, self.width, bias=False)
        self.q_weight, self.k_weight = (nn.Parameter(torch.rand(HEAD_DIM) + 0.5) for _ in range(2))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.projection(x).split([Q, KV, KV], -1)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, HEAD_DIM)

    def normed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.split(x)
        return norm(self.heads(q), self.q_weight), norm(self.heads(k), self.k_weight), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
        q, k, v = self.normed(x)
        return rope(q, cos, sin), rope(k, cos, sin), v


def inputs(rope_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    angles = torch.arange(TOKENS)[:, None, None] / 7 ** (torch.arange(rope_dim // 2) / rope_dim)
    angles = torch.cat((angles, angles), -1)
    return torch.randn(TOKENS, HIDDEN, dtype=dtype), angles.cos().to(dtype), angles.sin().to(dtype)


def check(
    model: Callable[..., object], *arguments: Tensor, dynamic: bool | None = None, **tolerance: float
) -> Compiled:
    """Compiles the call and compares outputs and their strides with eager's."""
    with torch.no_grad():
        wanted = model(*arguments)
    found = compiled(model, *arguments, dynamic=dynamic)
    pairs = zip(found.output, wanted, strict=True) if isinstance(wanted, tuple) else [(found.output, wanted)]
    for value, expected in pairs:
        torch.testing.assert_close(value, expected, **tolerance)
        assert value.stride() == expected.stride()
    return found


# Fused to something else ---------------------------------------------------------------------------------------------


def test_a_rotation_of_neighbours_is_not_fused_as_one_of_halves() -> None:
    """vllm-project/vllm-ascend#12765"""

    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            def pairs(x: Tensor) -> Tensor:
                a, b, c, s = x[..., ::2], x[..., 1::2], cos[..., : HEAD_DIM // 2], sin[..., : HEAD_DIM // 2]
                return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

            q, k, v = self.normed(x)
            return pairs(q), pairs(k), v

    found = check(Model(), *inputs())
    (call,) = [node for node in found.after.graph.nodes if str(node.target).startswith(PROLOGUE.replace("::", "."))]
    assert call.kwargs.get("is_neox_style", call.args[-1]) is False


def test_the_tail_of_a_partial_rotation_is_only_normed() -> None:
    """vllm-project/vllm#43676, vllm-ascend#6880"""

    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            q, k, v = self.normed(x)
            return *(torch.cat((rope(t[..., :8], cos, sin), t[..., 8:]), -1) for t in (q, k)), v

    assert check(Model(), *inputs(rope_dim=8)).report.ops == {PROLOGUE: 1}


def test_an_inner_value_that_is_used_elsewhere_is_kept() -> None:
    """pytorch/pytorch#129689"""

    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            q, k, v = self.normed(x)
            return rope(q, cos, sin), rope(k, cos, sin), v, q + q.sigmoid()

    assert PROLOGUE in check(Model(), *inputs()).report.ops


def test_an_input_that_is_computed_late_comes_before_the_op() -> None:
    """pytorch/pytorch#148751, #162019"""

    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            q, k, v = self.normed(x)
            rotated = rope(q, cos, sin)
            late = cos + 0 * rotated.sigmoid().mean()
            return rotated, rope(k, late, sin), v

    check(Model(), *inputs())


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2), (2, 0), (2,), (1,), (2, 1, 0)])
def test_outputs_keep_their_identity_whichever_are_used(order: tuple[int, ...]) -> None:
    """pytorch/pytorch#137280"""

    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            results = super().forward(x, cos, sin)
            return tuple(results[i] for i in order)

    check(Model(), *inputs())


def test_a_norm_without_a_residual_reads_no_old_memory() -> None:
    """vllm-project/vllm#41972"""
    weight = torch.rand(HIDDEN) + 0.5
    x = torch.randn(TOKENS, HIDDEN)
    found = check(norm, x, weight)
    assert found.report.ops == {"npu::npu_rms_norm": 1}
    for _ in range(3):
        del_me = [torch.full((TOKENS, HIDDEN), torch.nan) for _ in range(8)]
        del del_me
        torch.testing.assert_close(found.function(x, weight), norm(x, weight))


class _ThreeEqualParts(Prologue):
    width = 3 * Q

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.projection(x).chunk(3, -1)


class _KeysFirst(Prologue):
    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, q, v = self.projection(x).split([KV, Q, KV], -1)
        return q, k, v


class _ValuesFirst(Prologue):
    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v, k, q = self.projection(x).split([KV, KV, Q], -1)
        return q, k, v


@pytest.mark.parametrize(
    ("model", "is_fused"), [(Prologue, True), (_ThreeEqualParts, True), (_KeysFirst, False), (_ValuesFirst, False)]
)
def test_where_q_k_and_v_begin_is_read_off_the_graph(model: type[Prologue], is_fused: bool) -> None:
    """vllm-project/vllm#13686"""
    found = check(model(), *inputs())
    assert (PROLOGUE in found.report.ops) == is_fused


# Not found -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swapped", [False, True])
def test_operands_may_be_swapped(swapped: bool) -> None:
    """pytorch/pytorch#195782"""

    def model(x: Tensor, weight: Tensor) -> Tensor:
        bare = x * torch.rsqrt(1e-6 + x.pow(2).mean(-1, keepdim=True))
        return bare * weight if swapped else weight * bare

    found = check(model, torch.randn(TOKENS, HIDDEN), torch.rand(HIDDEN))
    assert found.report.ops == {"npu::npu_rms_norm": 1}


HEADS_OF: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(TOKENS, -1, HEAD_DIM),
    "reshape": lambda x: x.reshape(-1, x.shape[-1] // HEAD_DIM, HEAD_DIM),
    "unflatten": lambda x: x.unflatten(-1, (-1, HEAD_DIM)),
}


@pytest.mark.parametrize("name", HEADS_OF)
def test_heads_are_cut_by_any_view(name: str) -> None:
    """pytorch/pytorch#151649"""
    model = Prologue()
    model.heads = HEADS_OF[name]
    assert check(model, *inputs()).report.ops == {PROLOGUE: 1}


@pytest.mark.parametrize("shared", [True, False])
def test_rows_of_a_cache_may_be_shared_or_looked_up_for_each(shared: bool) -> None:
    """vllm-project/vllm#28042"""
    cache = torch.cat((torch.rand(64, HEAD_DIM // 2), torch.rand(64, HEAD_DIM // 2)), -1)

    class Model(Prologue):
        def forward(self, x: Tensor, positions: Tensor):
            def tables() -> list[Tensor]:
                return [torch.cat((t, t), -1).unsqueeze(1) for t in cache.index_select(0, positions).chunk(2, -1)]

            q, k, v = self.normed(x)
            first = tables()
            return rope(q, *first), rope(k, *(first if shared else tables())), v

    found = check(Model(), torch.randn(TOKENS, HIDDEN), torch.tensor([3, 0, 7, 63, 1]))
    assert [site.status for site in found.report.sites if site.kind == "qkv"] == ["lowered"]


def test_an_op_writes_what_its_schema_says_whatever_its_names() -> None:
    """pytorch/pytorch#137229, #132867"""
    with torch.library._scoped_library("npu_fuse_test", "FRAGMENT") as library:
        library.define("scaled_(Tensor x, Tensor? out=None) -> Tensor")
        library.impl("scaled_", lambda x, out=None: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("npu_fuse_test::scaled_", lambda x, out=None: torch.empty_like(x), lib=library)

        def model(x: Tensor, weight: Tensor) -> Tensor:
            scaled = torch.ops.npu_fuse_test.scaled_(x, out=None)
            scale = torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + 1e-6)
            torch.ops.npu_fuse_test.scaled_(scale)
            return scaled * scale * weight

        found = check(model, torch.randn(TOKENS, HIDDEN), torch.rand(HIDDEN))
        assert found.report.ops == {"npu::npu_rms_norm": 1}


def test_rows_may_be_viewed_between_the_projection_and_the_norm() -> None:
    """NVIDIA/TensorRT-LLM#14781, #14796"""
    projection, weight = nn.Linear(HIDDEN, HIDDEN, bias=False), torch.rand(HIDDEN)

    def model(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = (projection(x) + residual).reshape(2, 3, HIDDEN)
        return norm(total, weight), total

    found = check(model, torch.randn(6, HIDDEN), torch.randn(6, HIDDEN))
    assert found.report.ops == {"npu::npu_add_rms_norm": 1}


@pytest.mark.parametrize(
    "shape", [lambda x: (x.shape[0], -1, HEAD_DIM), lambda x: (-1, x.shape[-1] // HEAD_DIM, HEAD_DIM)]
)
def test_symbolic_views_are_one_whichever_size_is_left_open(shape) -> None:
    """vllm-project/vllm#45910"""
    model = Prologue()
    model.heads = lambda x: x.view(shape(x))
    arguments = inputs()
    for tensor in arguments:
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    torch._dynamo.mark_static(arguments[1], 1)
    torch._dynamo.mark_static(arguments[2], 1)
    assert check(model, *arguments, dynamic=True).report.ops == {PROLOGUE: 1}


@pytest.mark.parametrize("mask_first", [False, True])
def test_a_wide_mask_is_not_narrowed(mask_first: bool) -> None:
    """pytorch/pytorch#196118, #195782"""
    q, k, v = (torch.randn(1, 2, TOKENS, HEAD_DIM).half() for _ in range(3))
    mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5
        scores = mask + scores if mask_first else scores + mask
        return scores.softmax(-1).to(q.dtype) @ v

    check(model, q, k, v)


# Layouts -------------------------------------------------------------------------------------------------------------


def test_results_have_the_strides_that_the_model_relies_on() -> None:
    """pytorch/pytorch#130394, XPU-Forces/xpu_graph#420"""

    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            q, k, v = super().forward(x, cos, sin)
            row = v.as_strided((3, 4), (self.width, 2), Q + KV)
            return q.view(-1, Q), k.view(-1, KV), v, row.clone()

    check(Model(), *inputs())


# Types ---------------------------------------------------------------------------------------------------------------


def test_casting_before_and_behind_the_weight_are_two_norms() -> None:
    """InternLM/lmdeploy#2842, huggingface/transformers#29402"""
    x, weight = torch.randn(8, 64).bfloat16(), torch.randn(64).bfloat16()

    def gemma(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.float())).to(x.dtype)

    found = compiled(lambda x, weight: (norm(x, weight), gemma(x, weight)), x, weight)
    assert found.report.ops == {"npu::npu_rms_norm": 1, "npu::npu_gemma_rms_norm": 1}
    assert torch.equal(found.output[0], norm(x, weight))
    assert torch.equal(found.output[1], gemma(x, weight))


def test_angles_of_late_positions_stay_wide() -> None:
    """huggingface/transformers#29285, #25681"""

    class Model(Prologue):
        def forward(self, x: Tensor, positions: Tensor):
            angles = positions[:, None, None].float() / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
            angles = torch.cat((angles, angles), -1)
            q, k, v = self.normed(x)
            return *(rope(t.float(), angles.cos(), angles.sin()).to(x.dtype) for t in (q, k)), v

    model = Model().bfloat16()
    x, positions = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.arange(15958, 15963)
    check(model, x, positions, rtol=2**-6, atol=2**-6)


def test_wide_tables_of_a_narrow_x_stay_wide() -> None:
    """Dao-AILab/flash-attention#823"""
    x, cos, sin = torch.randn(2, 3, TOKENS, HEAD_DIM).bfloat16(), *(torch.randn(TOKENS, HEAD_DIM) for _ in range(2))

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype)

    found = check(model, x, cos, sin, rtol=0, atol=0)
    assert found.report.count("rope") == 1


# Writes, effects and inputs that share memory ------------------------------------------------------------------------


def check_calls(model: Callable[..., object], calls: Callable[[], list[tuple[Tensor, ...]]]) -> None:
    """Makes the calls in turn, compiled and eagerly, and compares outputs and all that was given, after each."""
    torch._dynamo.reset()
    through = torch.compile(model, backend="npu_fuse", options={"strict": True})
    with torch.no_grad():
        for own, expected in zip(calls(), calls(), strict=True):
            outputs, wanted = through(*own), model(*expected)
            outputs, wanted = (value if isinstance(value, tuple) else (value,) for value in (outputs, wanted))
            for value, want in zip((*outputs, *own), (*wanted, *expected), strict=True):
                torch.testing.assert_close(value, want, equal_nan=True)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("npu_fuse_bugs", "FRAGMENT") as library:
        yield library


def define(library: torch.library.Library, schema: str, run: Callable[..., object], fake: Callable[..., object]):
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"npu_fuse_bugs::{name}", fake, lib=library)
    return getattr(torch.ops.npu_fuse_bugs, name)


def test_a_write_through_a_view_that_no_one_uses_is_done() -> None:
    """pytorch/pytorch#104463: dead-code elimination took the write into a slice for dead"""
    projection = nn.Linear(8, 24)

    def model(x: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        qkv = projection(x)
        qkv[:, :8].mul_(0.25)
        count.add_(1)
        q, k, v = qkv.split(8, -1)
        return q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 0.1), k, v

    def calls() -> list[tuple[Tensor, ...]]:
        count = torch.zeros(())
        return [(torch.arange(24.0).view(3, 8), count), (torch.ones(3, 8), count)]

    check_calls(model, calls)


def test_two_views_of_one_base_that_an_op_writes(library: torch.library.Library) -> None:
    """pytorch/pytorch#153389: each view was functionalised on its own, and the second write undid the first"""

    def add(a: Tensor, b: Tensor) -> None:
        a.add_(1)
        b.add_(2)

    op = define(library, "add(Tensor(a!) a, Tensor(b!) b) -> ()", add, lambda a, b: None)
    total = define(library, "total(Tensor a, Tensor b) -> Tensor", lambda a, b: a * b, lambda a, b: a * 1)

    def model(x: Tensor) -> Tensor:
        first, second = x[0], x[1]
        op(first, second)
        return total(first, second) + x.sum()

    check_calls(model, lambda: [(torch.arange(8.0).view(2, 4),)])


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[0]])
def test_one_buffer_as_two_arguments_that_an_op_writes(library: torch.library.Library, part) -> None:
    """pytorch/pytorch#132238: both arguments were written in place, though each had to start from the old value"""

    def step(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        b.add_(1)
        return a.sum() + b.sum()

    op = define(library, "step(Tensor(a!) a, Tensor(b!) b) -> Tensor", step, lambda a, b: a.new_empty(()))
    check_calls(lambda x: op(x, part(x)) + x, lambda: [(torch.arange(8.0).view(2, 4),)])


@pytest.mark.parametrize("declared", [True, False])
def test_an_op_runs_as_often_as_it_is_called(library: torch.library.Library, declared: bool) -> None:
    """pytorch/pytorch#169141: two places that eliminate dead code disagreed on what has effects"""
    runs = []

    def store(x: Tensor, cache: Tensor) -> Tensor:
        runs.append(None)
        cache.add_(x)
        return x + 1

    name = f"store{declared}"
    schema = f"{name}(Tensor x, Tensor{'(a!)' if declared else ''} cache) -> Tensor"
    op = define(library, schema, store, lambda x, cache: x * 1)
    npu_fuse.register_side_effects(op, mutates=["cache"])

    def model(x: Tensor, cache: Tensor) -> Tensor:
        op(x, cache)
        op(x, cache)
        return x * 2

    check_calls(model, lambda: [(torch.ones(3), torch.zeros(3))])
    assert len(runs) == 4  # twice compiled, twice eagerly


def test_what_an_op_gives_back_is_its_input() -> None:
    """pytorch/pytorch#195422: dropout that drops nothing was taken for a new tensor"""

    def model(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5, training=False)
        y += y
        return x.sin()

    check_calls(model, lambda: [(torch.arange(4.0),)])


def test_inputs_that_are_views_of_one_base() -> None:
    """pytorch/pytorch#198095: the output was made from the wrong one of two inputs that share memory"""

    def model(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        b.mul_(2)
        return a.view(-1)[3:], b.sin()

    def calls() -> list[tuple[Tensor, ...]]:
        base = torch.arange(24.0).view(4, 6)
        return [(base, base[1:])]

    check_calls(model, calls)


def test_the_callers_module_is_as_it_was() -> None:
    """pytorch/pytorch#138980: a compiler changed the graph that it was given"""
    module = torch.fx.symbolic_trace(Prologue())
    before = str(module.graph)
    arguments = inputs()
    wanted = module(*arguments)
    for _ in range(2):
        found = compiled(module, *arguments)
        assert found.report.ops == {PROLOGUE: 1}
    assert str(module.graph) == before
    assert all(map(torch.equal, module(*arguments), wanted))
