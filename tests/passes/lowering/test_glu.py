"""Gated units become one op; separate gate and up become one matmul."""

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd.descriptors import SubclassGetAttrAOTInput
from torch.nn import functional as F  # noqa: N812  # its usual name

from helpers import compiled, refusal
from npu_fuse import Target


class Separate(nn.Module):
    def __init__(self, bias: tuple[bool, bool] = (False, False), activation=F.silu, dtype=torch.float32) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 24, bias=bias[0], dtype=dtype)
        self.up = nn.Linear(16, 24, bias=bias[1], dtype=dtype)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_separate_projections_are_packed(bias: bool, dtype: torch.dtype) -> None:
    model, x = Separate((bias, bias), dtype=dtype), torch.randn(2, 5, 16, dtype=dtype)
    with torch.no_grad():
        wanted = model(x)
    found = compiled(model, x)
    assert found.report.ops == {"npu::npu_swiglu": 1}
    assert found.report.launches_after == 2
    torch.testing.assert_close(found.output, wanted)
    assert model.gate.weight.untyped_storage().data_ptr() == model.up.weight.untyped_storage().data_ptr()
    with torch.no_grad():
        model.up.weight.mul_(2)
        torch.testing.assert_close(found.function(x), model(x))


def test_silu_may_be_spelled_out_and_stand_on_the_right() -> None:
    class Model(Separate):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = self.gate(x)
            return self.up(x) * (gate * torch.sigmoid(gate))

    model, x = Model(), torch.randn(3, 16)
    with torch.no_grad():
        wanted = model(x)
    found = compiled(model, x)
    assert found.report.ops == {"npu::npu_swiglu": 1}
    torch.testing.assert_close(found.output, wanted)


def split(y):
    return y.split(24, -1)


def chunk(y):
    return y.chunk(2, -1)


def sliced(y):
    return y[..., :24], y[..., 24:]


@pytest.mark.parametrize("halves", [split, chunk, sliced])
def test_halves_of_one_projection(halves) -> None:
    projection = nn.Linear(16, 48)

    def model(x: torch.Tensor) -> torch.Tensor:
        gate, up = halves(projection(x))
        return F.silu(gate) * up

    x = torch.randn(2, 5, 16)
    found = compiled(model, x)
    assert found.report.ops == {"npu::npu_swiglu": 1}
    assert found.report.launches_after == 2
    with torch.no_grad():
        torch.testing.assert_close(found.output, model(x))


def swapped(y):
    up, gate = y.chunk(2, -1)
    return gate, up


def strided(y):
    return y[..., ::2], y[..., 1::2]


def thirds(y):
    return y[..., :16], y[..., 16:32]


@pytest.mark.parametrize(
    ("halves", "reason"),
    [
        (swapped, "up is the first half"),
        (strided, "take turns in one tensor"),
        (thirds, "neither halves of one tensor"),
    ],
)
def test_other_cuts_are_refused(halves, reason: str) -> None:
    projection = nn.Linear(16, 48)

    def model(x: torch.Tensor) -> torch.Tensor:
        gate, up = halves(projection(x))
        return F.silu(gate) * up

    x = torch.randn(3, 16)
    found = compiled(model, x)
    assert not found.report.ops
    assert reason in found.report.sites[0].reason
    with torch.no_grad():
        assert torch.equal(found.output, model(x))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Separate(activation=torch.sigmoid), "its activation is sigmoid; there are ops for silu and gelu"),
        (Separate(activation=F.relu), "its activation is relu; there are ops for silu and gelu"),
        (Separate((True, False)), "some of its projections have a bias"),
    ],
)
def test_what_the_op_does_not_do_is_refused(model: nn.Module, reason: str) -> None:
    x = torch.randn(3, 16)
    found = compiled(model, x)
    assert not found.report.ops
    assert reason in found.report.sites[0].reason
    with torch.no_grad():
        assert torch.equal(found.output, model(x))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


GEGLU = {"npu::npu_geglu": 1}


@pytest.mark.parametrize("activation", [F.gelu, gelu_tanh])
@pytest.mark.parametrize("halves", [split, chunk, sliced, swapped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gelu_of_either_half(activation, halves, dtype: torch.dtype) -> None:
    def model(y: torch.Tensor) -> torch.Tensor:
        gate, up = halves(y)
        return activation(gate) * up

    y = torch.randn(2, 5, 48, dtype=dtype)
    found = compiled(model, y)
    assert found.report.ops == GEGLU
    assert found.report.launches_after == 1
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.output, model(y.double()).to(dtype), rtol=tolerance, atol=tolerance)
    (call,) = found.after.graph.find_nodes(op="call_function", target=torch.ops.npu.npu_geglu.default)
    assert call.args[1:] == (-1, 0 if activation is F.gelu else 1, halves is not swapped)
    roundings = found.report.sites[0].roundings
    if dtype == torch.bfloat16:
        assert f"the model rounds {activation.__name__}(gate) to torch.bfloat16 before the product" in roundings[0]
    else:
        assert not roundings


@pytest.mark.parametrize("activation", [F.gelu, gelu_tanh])
def test_separate_projections_before_gelu_are_packed(activation) -> None:
    model, x = Separate((True, True), activation), torch.randn(2, 5, 16)
    with torch.no_grad():
        wanted = model(x)
    found = compiled(model, x)
    assert found.report.ops == GEGLU
    assert found.report.launches_after == 2
    torch.testing.assert_close(found.output, wanted)


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_geglu_is_chosen_by_soc(soc: str) -> None:
    def model(y: torch.Tensor) -> torch.Tensor:
        gate, up = y.chunk(2, -1)
        return F.gelu(gate) * up

    found = compiled(model, torch.randn(3, 48), target=Target(soc))
    assert found.report.ops == (GEGLU if soc in ("ascend910b", "ascend910_93") else {})


def test_weights_that_are_passed_in_are_not_packed() -> None:
    def model(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    found = compiled(model, torch.randn(3, 16), torch.randn(24, 16), torch.randn(24, 16))
    assert not found.report.ops
    assert "not a parameter of the model" in found.report.sites[0].reason


def test_packing_can_be_turned_off() -> None:
    found = compiled(Separate(), torch.randn(3, 16), pack_weights=False)
    assert "pack_weights is off" in found.report.sites[0].reason


def test_weights_that_something_else_holds_are_not_moved() -> None:
    model, x = Separate(), torch.randn(3, 16)
    flat = torch.randn(2 * 24 * 16)
    for i, projection in enumerate((model.gate, model.up)):
        projection.weight.data = flat[i * 24 * 16 : (i + 1) * 24 * 16].view(24, 16)
    found = compiled(model, x)
    assert "share their storage with something else" in found.report.sites[0].reason
    flat.mul_(2)
    with torch.no_grad():
        assert torch.equal(found.function(x), model(x))


def test_one_projection_called_twice_is_not_packed_with_itself() -> None:
    projection = nn.Linear(16, 24, bias=False)

    def model(x: torch.Tensor) -> torch.Tensor:
        return F.silu(projection(x)) * projection(x)

    x = torch.randn(3, 16)
    found = compiled(model, x)
    assert not found.report.ops
    with torch.no_grad():
        assert torch.equal(found.output, model(x))


def test_weights_are_packed_in_one_order_a_graph() -> None:
    model = Separate()

    def both_ways(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.silu(model.gate(x)) * model.up(x) + F.silu(model.up(y)) * model.gate(y)

    x, y = torch.randn(3, 16), torch.randn(3, 16)
    with torch.no_grad():
        wanted = both_ways(x, y)
    found = compiled(both_ways, x, y)
    assert found.report.ops == {"npu::npu_swiglu": 1}
    assert any("packed with others already" in (site.reason or "") for site in found.report.sites)
    torch.testing.assert_close(found.output, wanted)


def test_a_gate_that_is_used_elsewhere_keeps_its_matmul() -> None:
    model = Separate()

    def used_raw(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = model.gate(x), model.up(x)
        return F.silu(gate) * up, gate

    found = compiled(used_raw, torch.randn(3, 16))
    assert not found.report.ops
    assert "used elsewhere too" in found.report.sites[0].reason


def test_a_result_of_another_type_than_the_gate_is_refused() -> None:
    found = compiled(lambda x: F.silu(x[..., :24]) * x[..., 24:], torch.randn(3, 48).half())
    assert found.report.ops == {"npu::npu_swiglu": 1}
    finer = {"params.steps": frozenset({torch.float64})}
    assert "the model computes in torch.float64" in refusal(found, "glu", finer)
    wide = {"params.dtype": torch.float32, "params.steps": frozenset()}
    assert refusal(found, "glu", wide) == "its result is torch.float32 for a gate of torch.float16"


def test_parts_of_a_tensor_subclass_are_not_packed() -> None:
    found = compiled(Separate(), torch.randn(3, 16))
    for node in found.before.graph.find_nodes(op="placeholder"):
        node.meta["desc"] = SubclassGetAttrAOTInput(node.meta["desc"], "_local_tensor")
    assert refusal(found, "glu").startswith("a weight of its projections is a DTensor")


def test_weights_with_gaps_are_not_packed() -> None:
    model, x = Separate(), torch.randn(3, 16)
    model.up.weight = nn.Parameter(torch.randn(16, 24).t())
    found = compiled(model, x)
    assert not found.report.ops
    assert "a weight of its projections is not contiguous: strides (1, 24)" in found.report.sites[0].reason
