"""The report as a page: it holds all of it, whatever stands in it."""

import json
import re

import torch
from torch.nn import functional

from helpers import compiled
from npu_fuse import Report, Site
from npu_fuse.passes.views.page import page


def content(report: Report) -> dict:
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', report.to_html(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_layers_come_in_order_and_what_is_outside_of_them_last() -> None:
    names = ["norm", "layers.10.mlp", "layers.9.mlp", "layers.9.self_attn", None]
    sites = content(Report([Site("glu", "lowered", module=name) for name in names]))["sites"]
    assert [site["layer"] for site in sites] == ["layers.9", "layers.9", "layers.10", None, None]


def test_the_models_own_lines_are_there() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.silu(x) * y

    report = compiled(model, torch.randn(2, 8).bfloat16(), torch.randn(2, 8).bfloat16()).report
    (source,) = content(report)["sources"].values()
    assert "functional.silu(x) * y" in source["lines"][source["line"] - source["first"]]


def test_a_file_that_is_not_here_is_left_out() -> None:
    report = Report([Site("glu", "lowered", source="/nowhere/model.py:3 in forward"), Site("glu", "lowered")])
    assert content(report)["sources"] == {"/nowhere/model.py:3 in forward": None}


def test_text_of_any_kind_stays_text() -> None:
    nasty = "</script><script>alert(1)</script><!-- __REPORT__ & \u2028 'quoted' \"twice\""
    report = Report([Site("glu", "refused", reason=nasty, module=nasty)])
    assert content(report)["sites"][0]["reason"] == nasty
    assert page(report).count("<script") == page(Report()).count("<script")
