"""Where a matmul and the sum over ranks behind it become one op, and where not; the other rank is only played."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers import compiled

Tensor = torch.Tensor
OP = "npu::npu_mm_all_reduce_base"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Plays some ranks, so many on a machine."""

    def play(count: int, local: int) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())

    yield play
    if dist.is_initialized():
        dist.destroy_process_group()


def summed(x: Tensor, group: str = "0") -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group))


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_and_its_sum_are_one_op(
    ranks: Callable[[int, int], None], shape: tuple[int, ...], bias: bool
) -> None:
    ranks(4, 8)
    layer = nn.Linear(16, 8, bias=bias).bfloat16()
    result = compiled(lambda x: summed(layer(x)) + 1, rows(*shape))
    assert result.report.ops == {OP: 1}
    (site,) = result.report.sites
    assert (site.params["ranks"], site.params["bias"]) == (4, bias)
    assert "roundings may differ" in site.roundings[0]
    torch.testing.assert_close(result.output, layer(rows(*shape)) + 1)
    assert not [node for node in result.after.graph.nodes if "c10d" in str(node.target)]


def test_before_a_norm_the_residual_is_added_there(ranks: Callable[[int, int], None]) -> None:
    ranks(2, 2)
    layer, weight = nn.Linear(16, 16, bias=False).bfloat16(), torch.ones(16).bfloat16()

    def model(x: Tensor) -> Tensor:
        total = x + summed(layer(x))
        return F.rms_norm(total, (16,), weight) + total

    assert compiled(model, rows(3, 16)).report.ops == {OP: 1, "npu::npu_add_rms_norm": 1}


layer = nn.Linear(16, 16, bias=False).bfloat16()


def _twice(x: Tensor) -> Tensor:
    y = layer(x)
    return summed(y) + y


REFUSED = {
    "three ranks": (3, 3, lambda x: summed(layer(x)), rows(3, 16), "its group has 3 ranks; the op takes 2, 4 or 8"),
    "two machines": (4, 2, lambda x: summed(layer(x)), rows(3, 16), "not known to be on one machine"),
    "decoding": (2, 2, lambda x: summed(layer(x)), rows(3, 1, 16), "for prompts, not for decoding"),
    "float32": (2, 2, lambda x: summed(layer.float()(x)), rows(3, 16).float(), "x1 is float32"),
    "used twice": (2, 2, _twice, rows(3, 16), "is used elsewhere too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_borders(ranks: Callable[[int, int], None], name: str) -> None:
    count, local, model, x, reason = REFUSED[name]
    ranks(count, local)
    layer.to(x.dtype)
    report = compiled(model, x).report
    (site,) = [site for site in report.sites if site.kind == "mm_all_reduce"]
    assert reason in site.reason
    assert OP not in report.ops
    layer.bfloat16()


def test_one_graph_has_these_ops_over_one_group(ranks: Callable[[int, int], None]) -> None:
    ranks(2, 2)
    other = dist.new_group([0, 1])

    def model(x: Tensor) -> Tensor:
        return fc.all_reduce(layer(summed(layer(x))), "sum", other)

    report = compiled(model, rows(3, 16)).report
    assert report.ops == {OP: 1}
    assert "another of these ops is over another group" in report.sites[1].reason


@pytest.mark.parametrize("reduce_op", ["max", "avg"])
def test_another_sum_is_none(ranks: Callable[[int, int], None], reduce_op: str) -> None:
    ranks(2, 2)
    report = compiled(lambda x: fc.all_reduce(layer(x), reduce_op, "0"), rows(3, 16)).report
    assert not report.sites
