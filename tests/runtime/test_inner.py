"""What runs a rewritten graph: torch or Inductor give the same, write the same, and fail without harm."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import npu_fuse
from npu_fuse.runtime.graphs.errors import CaptureError


class Block(nn.Module):
    """A norm, packed projections, a buffer that is written, and a size that may vary."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.gate, self.up = nn.Linear(size, 32, bias=False), nn.Linear(size, 32, bias=False)
        self.register_buffer("calls", torch.zeros(4))
        self.register_buffer("rows", torch.zeros(8, size))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += x.sum() + torch.arange(4)
        normed = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        self.rows[2:4].copy_(normed[:2])
        return nn.functional.silu(self.gate(normed)) * self.up(normed) + self.calls.sum() + self.rows.sum()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler for C++")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", raises)


def inductor(**settings: object) -> npu_fuse.Backend:
    return npu_fuse.Backend(inner="inductor", **{"strict": True, **settings})


@pytest.mark.parametrize("target", ["host", "ascend910b"])
def test_numbers_and_writes_are_the_models(target: str) -> None:
    """Of static and of varying sizes: the second length has a graph for all."""
    model, x = Block(), torch.randn(3, 16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    backend = inductor(target=target)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        found = [compiled(x), compiled(torch.cat([x, x])), model.calls.clone(), model.rows.clone()]
        model.load_state_dict(state)
        wanted = [model(x), model(torch.cat([x, x])), model.calls, model.rows]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert len(backend.reports) == 2
    if target != "host":
        assert backend.reports[0].ops == {"npu::npu_rms_norm": 1, "npu::npu_swiglu": 1}
        storages = {projection.weight.untyped_storage().data_ptr() for projection in (model.gate, model.up)}
        assert len(storages) == 1  # packed when it ran, which the kernels see


def test_a_weight_that_is_loaded_later_is_seen() -> None:
    model, x = Block(), torch.randn(3, 16)
    compiled = torch.compile(model, backend=inductor(target="ascend910b"))
    with torch.no_grad():
        compiled(x)
        model.up.weight.data = torch.randn(32, 16)
        model.gate.weight.copy_(torch.randn(32, 16))
        model.calls.zero_()
        found = compiled(x)
        model.calls.zero_()
        assert torch.allclose(found, model(x), atol=1e-4)


def test_a_view_of_an_input_is_given_and_an_input_is_written_through_another() -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y.mul_(2)
        return x.t(), x + y

    base = torch.randn(3, 3)
    wanted_base = base.clone()
    compiled = torch.compile(model, backend=inductor(target="host"))
    with torch.no_grad():
        view, total = compiled(base, base[:1])
        wanted = model(wanted_base, wanted_base[:1])
    assert torch.equal(base, wanted_base)
    assert torch.equal(total, wanted[1])
    assert torch.equal(view, wanted[0])
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def test_is_verified_by_the_first_call() -> None:
    model, x = Block(), torch.randn(3, 16)
    backend = inductor(target="ascend910b", verify="first")
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            model.calls.zero_()
            found = compiled(x)
            model.calls.zero_()
            assert torch.allclose(found, model(x), atol=1e-4)
    assert all(site.verified for site in backend.report.sites if site.status == "lowered")


def test_gradients_are_inductors_own() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    backend = inductor()
    torch.compile(model, backend=backend)(x).sum().backward()
    assert torch.allclose(model.weight.grad, x.sum(0).expand(4, 4), atol=1e-6)
    assert "gradients" in backend.reports[0].remark


@pytest.mark.usefixtures("broken")
def test_what_fails_to_compile_runs_op_by_op_with_one_warning() -> None:
    q = torch.randn(1, 2, 4, 8)
    with torch.no_grad():
        compiled = torch.compile(lambda q: sdpa(q, q, q), backend=inductor(strict=False))
        with pytest.warns(UserWarning, match="Inductor failed to compile it: RuntimeError: no compiler for C"):
            found = compiled(q)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(compiled(q), found)
    assert torch.allclose(found, sdpa(q, q, q), atol=1e-6)


@pytest.mark.usefixtures("broken")
def test_what_fails_to_compile_is_raised_under_strict() -> None:
    with torch.no_grad(), pytest.raises(Exception, match="no compiler for C"):
        torch.compile(lambda x: x + 1, backend=inductor())(torch.randn(3))


def test_nothing_is_captured_on_a_cpu() -> None:
    """A capture there would see no kernel of Inductor's, and would run a step that counts twice."""
    model, x = Block(), torch.randn(3, 16)
    with torch.no_grad():
        compiled = torch.compile(model, backend=inductor(graphs={}, strict=False))
        with pytest.warns(UserWarning, match="runs without capture: on a CPU, kernels of Inductor"):
            compiled(x)
        assert torch.allclose(model.calls, x.sum() + torch.arange(4), atol=1e-5)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="kernels of Inductor") as raised:
            torch.compile(model, backend=inductor(graphs={}))(x)
    assert isinstance(raised.value.inner_exception, CaptureError)


def test_is_an_option_of_torch_compile() -> None:
    x = torch.randn(3)
    with torch.no_grad():
        assert torch.equal(torch.compile(lambda x: x + 1, backend="npu_fuse", options={"inner": "inductor"})(x), x + 1)
    with pytest.raises(ValueError, match=r"Options\.inner: 'indcutor' is unknown; known: eager, inductor"):
        npu_fuse.Options.of({"inner": "indcutor"})
    with pytest.raises(ValueError, match=r"Inductor makes one kernel of several ops; use inner='eager'"):
        npu_fuse.Options(inner="inductor", profile_ranges=True)
