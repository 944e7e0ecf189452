"""What people look at: lines, files that run alone, a trace, ranges of a profiler."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

import npu_fuse
from helpers import compiled
from npu_fuse import Report, Site
from npu_fuse.passes.views.changes import changes
from npu_fuse.passes.views.code import line, lines
from npu_fuse.passes.views.dump import Dump

BF16 = torch.bfloat16


class Model(nn.Module):
    """A gated unit behind a norm, under names that a report can say; it holds a constant and gives an infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.RMSNorm(8, dtype=BF16))])

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = self.layers[0](x)
        return functional.silu(gate) * normed + torch.tensor(2.0), torch.full((2,), float("-inf")), x[:, 1:].size(0)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 8, dtype=BF16), torch.randn(3, 8, dtype=BF16)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    compiled(Model(), *inputs(), dump=folder)
    compiled(Model(), *inputs(), dynamic=True, dump=folder)
    return folder


def test_a_node_is_a_line_with_its_type() -> None:
    before = compiled(lambda x: torch.mean(x * 2, [1], True).float(), torch.ones(2, 8, dtype=BF16)).before
    first, *middle, last = lines(before.graph.nodes)
    assert first == "arg0_1: bf16[2, 8]"
    assert middle[:2] == [
        "mul: bf16[2, 8] = aten.mul.Tensor(arg0_1, 2)",
        "mean: bf16[2, 1] = aten.mean.dim(mul, [1], True)",
    ]
    assert re.fullmatch(r"_to_copy: f32\[2, 1\] = aten\._to_copy\.default\(mean, dtype=torch\.float32.*\)", middle[2])
    assert last == "return (_to_copy)" or last.startswith("return (_to_copy")


def test_a_text_is_quoted_and_results_are_named_by_their_types() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    y = graph.call_function(torch.ops.aten.gelu.default, (x,), {"approximate": "tanh"})
    y.meta["val"] = (torch.ones(2), 3)
    assert line(y) == "gelu_default: (f32[2], int) = aten.gelu.default(x, approximate='tanh')"


def test_each_graph_has_a_folder_of_its_own(dumped: Path) -> None:
    assert sorted(path.name for path in dumped.iterdir()) == ["graph_0", "graph_1"]
    Dump(dumped)
    assert (dumped / "graph_2").is_dir(), "none that is there is written to"
    (dumped / "graph_2" / "sites").rmdir()
    (dumped / "graph_2").rmdir()


def test_each_stage_is_a_file_that_runs_alone(dumped: Path) -> None:
    files = sorted(dumped.glob("graph_*/*.py"))
    assert [path.name for path in files[:3]] == ["0_dynamo.py", "1_aot.py", "2_encoder_only.py"]
    run = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", run, *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("-inf, -inf") == len(files)


def test_it_says_where_the_model_wrote_what(dumped: Path) -> None:
    text = (dumped / "graph_0" / "1_aot.py").read_text()
    assert "        # layers.0.0  " in text
    assert f"# {__file__}:" in text
    assert re.search(r"bf16|bfloat16", text)


def test_the_report_and_each_site_lie_beside_it(dumped: Path) -> None:
    folder = dumped / "graph_0"
    report = Report.from_json((folder / "report.json").read_text())
    assert report.sites
    assert len(list((folder / "sites").iterdir())) == len(report.sites)
    (norm,) = folder.glob("sites/*lowered_rms_norm_layers.0.0.txt")
    text = norm.read_text()
    assert "module: layers.0.0" in text
    assert re.search(r"before:\n( {4}.*\n)+\nafter:\n {4}npu_rms_norm", text)
    assert "npu_rms_norm" in (folder / "report.txt").read_text()
    assert "npu_rms_norm" in (folder / "report.html").read_text()


def test_what_has_no_numbers_gets_them(tmp_path: Path) -> None:
    """A model on the meta device runs nowhere, and its dumped graphs do: its masks are those of the contract."""
    with torch.device("meta"):
        q = torch.empty(1, 2, 8, 16, dtype=BF16)
    compiled(lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True), q, dump=tmp_path)
    (file,) = tmp_path.glob("graph_0/*_cleanup.py")
    assert "sparse_mode = 3" in file.read_text()
    done = subprocess.run([sys.executable, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_cannot_be_made_costs_the_dump_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    backend = npu_fuse.Backend(dump=tmp_path / "file" / "folder")
    with torch.no_grad(), pytest.warns(UserWarning, match="nothing is dumped, as the folder can't be made"):
        torch.compile(nn.RMSNorm(8, dtype=BF16), backend=backend)(inputs()[0])
    assert backend.report.ops == {"npu::npu_rms_norm": 1}


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_FUSE_DUMP", str(tmp_path))
    compiled(nn.RMSNorm(8, dtype=BF16), inputs()[0])
    assert (tmp_path / "graph_0" / "report.json").is_file()


def test_torch_logs_and_tlparse_list_each_stage_and_the_report(tmp_path: Path) -> None:
    code = "import torch; torch.compile(torch.nn.RMSNorm(8), backend='npu_fuse').eval()"
    run = f"{code}.requires_grad_(False)(torch.ones(2, 8))"
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path), "TORCH_LOGS": "npu_fuse"}
    done = subprocess.run([sys.executable, "-c", run], env=environment, check=True, capture_output=True, text=True)
    assert re.search(r"\[0/0\] graph 0: 1 npu::npu_rms_norm; \d+ launches became 1", done.stderr)
    (trace,) = tmp_path.glob("*.log")
    program = Path(sys.executable).with_name("tlparse")
    subprocess.run([program, trace, "-o", tmp_path / "out", "--no-browser"], check=True, capture_output=True)
    index = (tmp_path / "out" / "index.html").read_text()
    for name in ("0_dynamo", "1_aot", "3_fuse", "5_cleanup", "report", "report_page"):
        assert re.search(rf"npu_fuse_{name}_\d+\.(txt|json)", index), name
    (report,) = tmp_path.glob("out/*/npu_fuse_report_[0-9]*.json")
    assert json.loads(report.read_text())["ops"] == {"npu::npu_rms_norm": 1}


def test_a_site_keeps_its_lines_where_somebody_looks() -> None:
    report = npu_fuse.explain(nn.RMSNorm(8, dtype=BF16), inputs()[0])
    assert "aten.rsqrt" in "".join(report.sites[0].before)
    assert "npu.npu_rms_norm" in "".join(report.sites[0].after)
    assert Report.from_json(report.to_json()).sites[0].after == report.sites[0].after
    assert not compiled(nn.RMSNorm(8, dtype=BF16), inputs()[0]).report.sites[0].before


def test_json_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="reads version 3 of the report, and got 1"):
        Report.from_json(json.dumps({"version": 1}))


def test_nodes_say_what_they_come_from() -> None:
    found = compiled(nn.RMSNorm(8, dtype=BF16), inputs()[0])
    (node,) = (node for node in found.after.graph.nodes if node.target is torch.ops.npu.npu_rms_norm.default)
    (source,) = node.meta["from_node"]
    assert source.pass_name == "npu_fuse"
    assert source.name in {node.name for node in found.before.graph.nodes}
    assert "rms_norm" in node.meta["stack_trace"]


def test_a_profiler_sees_sites_by_name() -> None:
    found = compiled(Model(), *inputs(), profile_ranges=True)
    with torch.no_grad(), torch.profiler.profile() as profile:
        found.function(*inputs())
    names = {event.key for event in profile.key_averages()}
    assert "rms_norm: layers.0.0" in names
    assert "rms_norm: layers.0.0" not in str(compiled(Model(), *inputs()).after.graph)


def test_a_layer_is_a_row_and_layers_that_are_alike_are_one() -> None:
    sites = [Site("glu", "lowered", module=f"model.layers.{n}.mlp") for n in (0, 1, 2, 4)]
    sites += [Site("glu", "refused", module="model.layers.3.mlp"), Site("rope", "missed", module="model.rotary")]
    text = str(Report(sites))
    assert "model.layers.0…2" in text
    assert "0/1" in text
    assert "(outside of layers)" in text
    assert "layers.0…2,4.mlp" in text


def test_changes_are_told_by_site_and_by_op() -> None:
    def told(before: Report, after: Report) -> str:
        console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(changes(before, after))
        return " ".join(console.export_text().split())

    lowered = Report([Site("glu", "lowered", op="npu::npu_swiglu", module="layers.0.mlp")], launches_after=3)
    refused = Report([Site("glu", "refused", reason="no kernel", module="layers.0.mlp")], launches_after=5)
    assert changes(lowered, lowered) is None
    assert "lowered: npu::npu_swiglu │ refused: no kernel" in told(lowered, refused)
    assert "launches when fused │ 3 │ 5" in told(lowered, refused)
    assert "not there │ refused: no kernel" in told(Report(launches_after=5), refused)
