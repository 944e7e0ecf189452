"""What raises while a graph is compiled is left out of it, alone; the model runs, and one warning says what and why."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from npu_fuse import Backend, Report, Site
from npu_fuse.passes.lowering import LOWERINGS
from npu_fuse.passes.pipeline import Flow
from npu_fuse.patterns import KINDS, RULES
from npu_fuse.patterns.rms_norm import KIND as RMS_NORM

WIDTH = 32


class Broken(Backend):
    """A backend of which something raises."""

    def __init__(self, flow: Flow, **settings: Any) -> None:
        super().__init__(flow=flow, **settings)


class Model(nn.Module):
    """Kinds of several passes: norms, a gated unit, attention, and a write into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, index, x[0])
        y = self.norm(x)
        heads = y.unflatten(-1, (2, -1)).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        y = y + attended.transpose(1, 2).flatten(2)
        y = self.after(y)
        return self.down(functional.silu(self.gate(y)) * self.up(y)) + cache.sum()


ALL = {"rms_norm": 2, "add_rms_norm": 1, "attention": 1, "glu": 1, "in_place": 1}


def run(flow: Flow, **settings: Any) -> tuple[Report, list[str]]:
    """Runs the model through a flow, and compares; gives the report and the warnings."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().eval()
    backend = Broken(flow, **settings)
    x, index = torch.randn(2, 5, WIDTH), torch.tensor([1, 0, 6, 3, 4])
    own, wanted = torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torch.compile(model, backend=backend)(x, own, index)
        torch.testing.assert_close(found, model(x, wanted, index), rtol=1e-5, atol=1e-6)
    assert torch.equal(own, wanted)
    (report,) = backend.reports
    return report, [str(w.message) for w in caught if "npu_fuse" in str(w.message)]


def lowered(report: Report) -> dict[str, int]:
    return dict.fromkeys(ALL, 0) | Counter(site.kind for site in report.sites if site.status == "lowered")


def raising(*_: Any, **__: Any) -> Any:
    raise KeyError("a bug of ours")


def check_told(report: Report, messages: list[str], part: str) -> None:
    (message,) = messages
    assert f"{part} is left out, by an internal failure: KeyError: 'a bug of ours'" in message
    assert list(report.left_out) == [part]
    assert "raise KeyError" in report.left_out[part]
    assert f"{part} left out by an internal failure" in report.summary()


def test_all_is_there_where_nothing_raises() -> None:
    report, messages = run(Flow(), strict=True)
    assert lowered(report) == ALL
    assert not messages
    assert not report.left_out


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_that_raises_is_left_out_alone(kind: str) -> None:
    def late(node: fx.Node, *others: Any) -> Any:
        if "sum" in node.name:  # when much is found already
            raise KeyError("a bug of ours")
        return rule.match(node, *others)

    (rule,) = (rule for rule in RULES if rule.kind == kind)
    report, messages = run(Flow(rules=[replace(r, match=late, roots=None) if r is rule else r for r in RULES]))
    check_told(report, messages, f"recognise of {kind}")
    assert not any(site.kind == kind for site in report.sites)
    without = {"rms_norm": 0, "add_rms_norm": 0} if kind == RMS_NORM else {kind: 0} if kind in ALL else {}
    assert lowered(report) == ALL | without


def broken_before(match: Any, edit: Any) -> Any:
    edit.contiguous(edit.call(torch.ops.aten.neg.default, match.node, at_site=True))
    raise KeyError("a bug of ours")


def broken_behind(match: Any, edit: Any) -> Any:
    LOWERINGS[match.kind](match, edit)
    commit = edit.commit

    def half_done() -> None:
        commit()
        raise KeyError("a bug of ours")

    edit.commit = half_done
    return None


@pytest.mark.parametrize("broken", [broken_before, broken_behind])
@pytest.mark.parametrize("kind", ["rms_norm", "add_rms_norm", "attention", "glu"])
def test_a_lowering_that_raises_is_undone_alone(kind: str, broken: Callable[..., Any]) -> None:
    report, messages = run(Flow(lowerings={**LOWERINGS, kind: broken}))
    check_told(report, messages, f"fuse of {kind}")
    assert lowered(report) == ALL | {kind: 1 if kind == RMS_NORM else 0}  # of two, one is a part of the add's
    reasons = {site.reason for site in report.sites if site.kind == kind and site.status == "refused"}
    assert reasons == {"its rewriting failed internally: KeyError: 'a bug of ours'"}


def test_a_lowering_that_leaves_no_whole_graph_is_undone() -> None:
    def out_of_order(match: Any, edit: Any) -> Any:
        contract = LOWERINGS[RMS_NORM](match, edit)
        commit = edit.commit

        def moved() -> None:
            commit()
            next(iter(edit.rewriter.graph.nodes)).prepend(min(edit.created))  # before all of its inputs

        edit.commit = moved
        return contract

    report, (message,) = run(Flow(lowerings={**LOWERINGS, RMS_NORM: out_of_order}))
    assert "fuse of rms_norm is left out, by an internal failure: RuntimeError" in message
    assert lowered(report) == ALL | {"rms_norm": 1}


def test_a_merge_that_leaves_no_whole_graph_is_undone() -> None:
    def out_of_order(rewriter: Any, *, disabled: bool) -> list[Any]:
        first, *_, last = (node for node in rewriter.graph.nodes if node.op == "call_function")
        first.prepend(last)  # before its inputs
        return [Site("repeated_projection", "lowered", op="aten.linear")]

    report, (message,) = run(Flow(merge=out_of_order))
    assert "the pass repeated_projection is left out, by an internal failure: RuntimeError" in message
    assert lowered(report) == ALL


@pytest.mark.parametrize(
    ("name", "seam", "left"),
    [
        ("repeated_projection", "merge", ALL),
        ("encoder_only", "free", ALL),
        ("in_place", "put_back", ALL | {"in_place": 0}),
        ("cleanup", "cleanup", ALL),
    ],
)
def test_a_pass_that_raises_is_left_out(name: str, seam: str, left: dict[str, int]) -> None:
    report, messages = run(Flow(**{seam: raising}))
    check_told(report, messages, f"the pass {name}")
    assert lowered(report) == left


def test_several_that_raise_are_left_out_each() -> None:
    rules = [replace(rule, match=raising) if rule.kind == "glu" else rule for rule in RULES]
    report, messages = run(Flow(rules=rules, lowerings={**LOWERINGS, "attention": raising}, put_back=raising))
    assert len(messages) == 3
    assert list(report.left_out) == ["recognise of glu", "fuse of attention", "the pass in_place"]
    assert lowered(report) == ALL | {"glu": 0, "attention": 0, "in_place": 0}


def test_strict_raises_what_was_raised() -> None:
    with pytest.raises(Exception, match="a bug of ours"):
        run(Flow(put_back=raising), strict=True)


def test_the_reproducer_compiles_the_graph_alone(tmp_path: Path) -> None:
    run(Flow(lowerings={**LOWERINGS, "glu": raising}), dump=tmp_path, disable={"rms_norm"})
    (folder,) = tmp_path.glob("failed_fuse_glu*")
    assert "KeyError: 'a bug of ours'" in (folder / "traceback.txt").read_text()
    script = (folder / "reproduce.py").read_text()
    assert "Backend(strict=True, disable={'rms_norm'})" in script
    subprocess.run([sys.executable, str(folder / "reproduce.py")], check=True, cwd="/")
