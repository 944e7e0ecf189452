"""What is expected and isn't fused is told with what fell short and why; what the machine has no op for, once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from npu_fuse import Backend, Options, Target

WIDTH = 32


class LayerNorm(nn.Module):
    """Nearly an RMSNorm: the mean is taken off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Narrow(nn.Module):
    """An RMSNorm that no op stands for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def model(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer) for layer in layers))


def warned(caplog: pytest.LogCaptureFixture, module: Any, **settings: Any) -> list[str]:
    """What is logged as a warning when a module is compiled."""
    torch._dynamo.reset()
    caplog.clear()
    x = torch.randn(3, WIDTH)
    backend = settings.pop("backend", None) or Backend(**settings)
    with caplog.at_level(logging.WARNING, logger="npu_fuse"), torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=backend)(x), module(x))
    return [record.getMessage() for record in caplog.records if record.name == "npu_fuse"]


def norm() -> nn.Module:
    return nn.RMSNorm(WIDTH, eps=1e-6)


def test_what_is_there_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    two = model(norm(), norm())
    assert not warned(caplog, two, strict=True, expect={"rms_norm": 2})
    assert not warned(caplog, two, strict=True, expect={"rms_norm": 1})
    assert not warned(caplog, two, strict=True)


def test_a_part_of_a_larger_site_counts(caplog: pytest.LogCaptureFixture) -> None:
    after = norm()

    def added(x: torch.Tensor) -> torch.Tensor:
        return after(x + x.roll(1, 0))

    assert not warned(caplog, added, strict=True, expect={"rms_norm": 1, "add_rms_norm": 1})


def test_what_falls_short_is_told_with_its_reasons(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = warned(caplog, model(norm(), Narrow(), Narrow(), LayerNorm()), expect={"rms_norm": 4})
    first, refused, missed = message.splitlines()
    assert first == "graph 0: 1 of the 4 rms_norm expected became ops:"
    assert refused == "  2 refused, in 1.1, 2.1: the model computes in torch.float64, the op in torch.float32"
    assert missed.startswith("  1 nearly one, in 3.1: ")


def test_strict_raises_it() -> None:
    compiled = torch.compile(model(norm(), Narrow()), backend=Backend(strict=True, expect={"rms_norm": 2}))
    told = r"1 of the 2 rms_norm expected became ops:\n  1 refused, in 1\.1"
    with torch.no_grad(), pytest.raises(Exception, match=told):
        compiled(torch.randn(3, WIDTH))


def test_a_graph_in_which_nothing_is_like_it(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = warned(caplog, model(nn.Tanh()), expect={"rms_norm": 1})
    assert message.splitlines()[1] == "  nothing in the graph is nearly that"
    (message,) = warned(caplog, model(norm()), expect={"rms_norm": 2})
    assert message.splitlines() == [
        "graph 0: 1 of the 2 rms_norm expected became ops:",
        "  nothing else in the graph is nearly that",
    ]


def test_each_graph_is_held_to_it_but_those_between(caplog: pytest.LogCaptureFixture) -> None:
    layers = [model(norm()), model(norm(), norm())]

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = layers[0](x * 2)
        torch._dynamo.graph_break()
        x = torch.tanh(x + 1)  # glue
        torch._dynamo.graph_break()
        return layers[1](x)

    (message,) = warned(caplog, broken, expect={"rms_norm": 2})
    assert message.startswith("graph 0: 1 of the 2 rms_norm")


def test_what_a_machine_has_no_op_for_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend(target=Target("ascend310p"))
    found = [warned(caplog, model(Fast(), Fast()), backend=backend) for _ in range(2)]
    assert found == [
        [
            "fast_gelu: 2 recognised, and no op for them here: npu::npu_fast_gelu has no kernel on ascend310p"
            " (it has one on ascend910_93, ascend910b)"
        ],
        [],
    ]
    assert not warned(caplog, model(Fast()), target=Target("host"))


class Fast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


def test_expectations_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Options\.expect: unknown kind 'rmsnorm' \(did you mean 'rms_norm'\?\)"):
        Options(expect={"rmsnorm": 1})
    with pytest.raises(ValueError, match=r"Options\.expect: 'qkv' is to be a number of sites, not True"):
        Options(expect={"qkv": True})
