"""Ops that AOTAutograd would take apart stay whole, and come back as the model called them."""

import torch
from torch import nn

from helpers import compiled


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.projection(x).view(2, 5, 2, 8).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_linear_and_attention_are_whole_for_recognition_and_restored_to_run() -> None:
    model, x = Attention(), torch.randn(2, 5, 16)
    found = compiled(model, x, disable={"attention"})
    before = [str(node.target) for node in found.before.graph.nodes]
    assert "npu_fuse.linear.default" in before
    assert "npu_fuse.scaled_dot_product_attention.default" in before
    assert "aten.linear.default" in found.targets()
    assert "aten.scaled_dot_product_attention.default" in found.targets()
    assert not any("npu_fuse." in target for target in found.targets())
    with torch.no_grad():
        assert torch.equal(found.output, model(x))


def test_every_way_to_call_matmul_is_one_op() -> None:
    def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.matmul(a, b) + (a @ b) + a.matmul(b) + torch.ops.aten.matmul(a, b)

    a, b = torch.randn(2, 3, 4, 5), torch.randn(5, 6)
    found = compiled(model, a, b)
    assert [str(node.target) for node in found.before.graph.nodes].count("npu_fuse.matmul.default") == 4
    assert found.targets().count("aten.matmul.default") == 4
    assert torch.equal(found.output, model(a, b))


def test_dropout_in_attention_draws_the_numbers_that_eager_draws() -> None:
    def model(q: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    q = torch.randn(1, 2, 4, 8)
    torch.manual_seed(0)
    found = compiled(model, q)
    assert not any("npu_fuse." in str(node.target) for node in found.before.graph.nodes)
    torch.manual_seed(0)
    again = found.function(q)
    torch.manual_seed(0)
    assert torch.equal(again, model(q))


def test_strides_of_the_outputs_are_eagers() -> None:
    model, x = Attention(), torch.randn(2, 5, 16)
    found = compiled(model, x)
    with torch.no_grad():
        assert found.output.stride() == model(x).stride()
