"""One row of the results: what is counted in one call of one model."""

from collections import Counter

import torch

from measure import Measuring, _difference, measure


def test_a_row_has_the_sites_of_a_model_and_what_peers_find() -> None:
    row = measure("llama", "prefill", "cpu")
    assert "error" not in row
    assert row["found"] == {
        "rms_norm": 5,
        "add_rms_norm": 4,
        "rope": 4,
        "glu": 2,
        "glu:silu": 2,
        "qkv:separate": 2,
        "attention": 2,
        "attention:causal": 2,
    }
    assert row["lowered"] == row["found"]
    assert row["graphs"] == 1
    assert row["peers"]["torchair"] == {"rms_norm": 0, "rope": 4}
    assert row["peers"]["torchair, traced in bfloat16"] == {"rms_norm": 5}


def test_a_row_in_float32_has_the_difference_from_eager() -> None:
    row = measure("llama", "prefill_fp32", "cpu")
    assert row["found"]["rms_norm"] == 5
    assert 0 <= row["difference"] < 1e-5
    assert row["peers"] == {}


def test_what_fails_is_a_row_with_the_error() -> None:
    row = measure("no_such_model", "prefill", "cpu")
    assert row["error"] == "KeyError: 'no_such_model'"
    assert (row["model"], row["phase"]) == ("no_such_model", "prefill")


def test_a_graph_that_runs_twice_counts_twice() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    torch._dynamo.reset()
    backend = Measuring("cpu", ())
    with torch.no_grad():
        compiled = torch.compile(Norm(), backend=backend)
        compiled(torch.randn(2, 16))
        compiled(torch.randn(2, 16))
    assert len(backend.reports) == 1
    assert backend.total.count("rms_norm") == 2


def test_a_peer_that_fails_is_noted_and_costs_nothing_else() -> None:
    def found_by_broken(*_: object) -> dict[str, Counter[str]]:
        raise ValueError("no such pattern\nin this graph")

    torch._dynamo.reset()
    backend = Measuring("cpu", (found_by_broken,))
    with torch.no_grad():
        torch.compile(torch.nn.SiLU(), backend=backend)(torch.randn(2, 16))
    assert backend.failures == {"broken": "ValueError: no such pattern"}
    assert backend.peers == {}
    assert len(backend.reports) == 1


def test_the_difference_is_relative_and_over_all_outputs() -> None:
    wanted = {"a": torch.tensor([2.0, -4.0]), "b": (torch.tensor([1.0]), None)}
    found = {"a": torch.tensor([2.0, -4.5]), "b": (torch.tensor([1.0]), None)}
    assert _difference(found, wanted) == 0.125
    assert _difference(wanted, wanted) == 0.0
