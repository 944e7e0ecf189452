"""The report: counts, JSON, and a table that a person reads."""

import json

import pytest
import torch
from torch import nn

from helpers import compiled
from npu_fuse import Report, Site
from npu_fuse.passes.launches import cost


def example() -> Report:
    report = Report(launches_before=10, launches_after=4)
    for layer in range(3):
        report.sites.append(
            Site("glu", "lowered", op="npu::npu_swiglu", module=f"layers.{layer}.mlp", params={"activation": "silu"})
        )
    report.sites.append(Site("glu", "refused", reason="its activation is relu", params={"activation": "relu"}))
    report.sites.append(Site("rope", "missed", reason="element 0 reads +x[4] * sin"))
    report.ops["npu::npu_swiglu"] = 3
    return report


def test_counts_what_was_recognised_by_kind_and_parameters() -> None:
    report = example()
    assert report.count("glu") == 4
    assert report.count("glu", activation="silu") == 3
    assert report.count("glu", activation="gelu") == 0
    assert report.count("glu", no_such_parameter=None) == 0
    assert report.count("rope") == 0, "a near miss is not recognised"


def test_a_kind_that_there_is_not_is_no_zero() -> None:
    assert example().count("qkv") == 0
    with pytest.raises(ValueError, match=r"Report\.count: unknown kind 'rmsnorm' \(did you mean 'rms_norm'\?\)"):
        example().count("rmsnorm")
    taught = Report(own_kinds=("soft_cap",))
    assert Report.merged([Report(), Report.from_json(taught.to_json())]).count("soft_cap") == 0


def test_a_site_outside_of_all_modules_is_the_models_own() -> None:
    x = torch.randn(3, 8)
    assert "│ the model itself │" in str(compiled(nn.RMSNorm(8), x).report)
    assert "│ 0 " in str(compiled(nn.Sequential(nn.RMSNorm(8)), x).report)


def test_merges() -> None:
    merged = Report.merged([example(), example(), Report(remark="needs gradients")])
    assert merged.count("glu") == 8
    assert merged.ops["npu::npu_swiglu"] == 6
    assert (merged.launches_before, merged.launches_after, merged.graphs) == (20, 8, 3)
    assert merged.remark == "needs gradients"


def test_json_holds_all_of_it() -> None:
    report = compiled(nn.RMSNorm(8, dtype=torch.bfloat16), torch.randn(3, 8, dtype=torch.bfloat16)).report
    content = json.loads(report.to_json())
    assert content["version"] == 3
    assert content["ops"] == {"npu::npu_rms_norm": 1}
    assert content["seconds"] > 0
    (site,) = content["sites"]
    assert site["params"]["dtype"] == "bfloat16"
    assert site["status"] == "lowered"


def test_prints_alike_sites_in_one_row_with_the_reason() -> None:
    text = str(example())
    assert "3 npu::npu_swiglu; 10 launches became 4; 1 sites refused, 1 near misses" in " ".join(text.split())
    assert "layers.0…2.mlp" in text
    assert "its activation is relu" in text
    assert "element 0 reads +x[4] * sin" in text
    assert repr(example()).startswith("<Report of 1 graph: 3 npu::npu_swiglu")


def test_an_untried_graph_says_why() -> None:
    assert Report(remark="the graph needs gradients").summary() == "nothing fused: the graph needs gradients"


def test_launches_are_calls_that_are_no_views() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a, b = x.view(2, 3, 4).transpose(0, 1).split(2, -1)  # views
        return torch.cat([a, b.unsqueeze(0)[0]]).exp() + x.sum()  # cat, exp, sum, add

    assert cost(compiled(model, torch.randn(6, 4)).before.graph).launches == 4
