"""The command: what it says of a model, its exit codes, and that a user's mistake is told in one line."""

import json
from pathlib import Path

import pytest
import torch

from npu_fuse import Report
from npu_fuse.runtime.cli import FOUND, OK, USAGE, main

MODEL = """
import torch
from torch.nn import functional

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(8, dtype=torch.bfloat16)

    def forward(self, x, gate):
        return self.norm(functional.silu(gate) * x)

def build():
    return Model(), (torch.ones(2, 8, dtype=torch.bfloat16),), {"gate": torch.ones(2, 8, dtype=torch.bfloat16)}

def alone():
    return Model()

def failing():
    return Model(), (torch.ones(3),)

def misshapen():
    return torch.nn.Linear(2, 2), (torch.ones(3, 3),)

def raising():
    raise OSError("no such weights")
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "a_model.py"
    path.write_text(MODEL)
    return path


def test_a_file_of_the_users_own(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    assert main(["explain", f"{model}:build", "--json", str(report), "--html", str(page)]) == OK
    found = Report.from_json(report.read_text())
    assert found.ops["npu::npu_rms_norm"] == 1
    assert "npu::npu_rms_norm" in page.read_text()
    assert "rms_norm" in capsys.readouterr().out


def test_models_of_transformers_are_built_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main(["explain", "qwen3", "--layers", "1", "--quiet", "--json", str(report)]) == OK
    prefill, decode = (line for line in capsys.readouterr().out.split("\n") if line.startswith(("prefill", "decode")))
    assert prefill
    assert decode
    found = Report.from_json(report.read_text())
    assert [site.params["mask"] for site in found.sites if site.kind == "attention"] == ["causal", "decode_prefix"]
    assert found.bytes_before > 1e9, "at its full size"


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 32}
    config = {"model_type": "llama", **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = tmp_path / "report.json"
    assert main(["explain", str(tmp_path), "--phase", "prefill", "--disable", "glu", "--json", str(report)]) == OK
    (glu,) = (site for site in Report.from_json(report.read_text()).sites if site.kind == "glu")
    assert glu.reason == "glu is turned off by Options.disable"


def test_an_exported_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    norm = torch.nn.RMSNorm(8, dtype=torch.bfloat16)
    torch.export.save(torch.export.export(norm, (torch.ones(2, 8, dtype=torch.bfloat16),)), tmp_path / "norm.pt2")
    assert main(["explain", str(tmp_path / "norm.pt2"), "--quiet"]) == OK
    assert "1 npu::npu_rms_norm" in capsys.readouterr().out


def test_dump_writes_files_that_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", f"{model}:build", "--to", str(tmp_path / "dump")]) == OK
    assert "report.html" in capsys.readouterr().out
    assert {path.suffix for path in (tmp_path / "dump" / "graph_0").glob("*.*")} == {".py", ".html", ".json", ".txt"}


def test_diff_says_what_changed(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = str(tmp_path / "one.json"), str(tmp_path / "other.json")
    main(["explain", f"{model}:build", "--json", one])
    main(["explain", f"{model}:build", "--json", other, "--disable", "rms_norm"])
    capsys.readouterr()
    assert main(["diff", one, one]) == OK
    assert main(["diff", one, other]) == FOUND
    text = " ".join(capsys.readouterr().out.split())
    assert "lowered: npu::npu_rms" in text
    assert "refused: rms_norm" in text


def test_ops_tells_of_each_op_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == OK
    assert main(["ops", "npu_rms_norm"]) == OK
    text = capsys.readouterr().out
    assert "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "no_such_model"], "neither a folder, nor a file, nor a model type"),
        (["explain", "qwen3", "--layers", "99"], "--layers 99: the model has 32"),
        (["explain", "nowhere.py:build"], "there is no file nowhere.py"),
        (["explain", "{model}"], "say which function of it returns the model"),
        (["explain", "{model}:other"], "has no function 'other'; it has Model, alone, build,"),
        (["explain", "{model}:alone"], "must return (model, args) or (model, args, kwargs), not Model"),
        (["explain", "{model}:failing"], "the model can't be called: "),
        (["explain", "{model}:misshapen"], "RuntimeError: a and b must have same reduction dim"),
        (["explain", "qwen3", "--tokens", "0"], "--tokens 0: at least one is needed"),
        (["explain", "{model}:build", "--layers", "1"], "--layers is for models of transformers"),
        (["explain", "{model}:raising"], "failed: OSError: no such weights"),
        (["explain", "{model}:build", "--disable", "rms"], "unknown kind 'rms'"),
        (["explain", "{model}:build", "--json", "{folder}"], "can't be written: Is a directory"),
        (["explain", "{folder}"], "has no config.json"),
        (["explain", "{folder}/no.pt2"], "there is no file"),
        (["dump", "{model}:build", "--to", "{model}"], "can't be made"),
        (["diff", "{model}", "{model}"], "is no report"),
        (["diff", "nowhere", "nowhere"], "can't be read: No such file"),
        (["ops", "npu_nothing"], "no op is called 'npu_nothing'"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str], said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([argument.format(model=model, folder=tmp_path) for argument in arguments])
    error = capsys.readouterr().err
    assert code == USAGE
    assert said in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_an_unknown_command_is_told_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explian"])
    assert "invalid choice: 'explian'" in capsys.readouterr().err


def test_sites_are_verified(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{model}:build"]) == OK
    assert "1 rms_norm: max error 0 within tolerance" in capsys.readouterr().out


def test_sites_of_a_model_of_transformers_are_verified_on_random_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 32, "head_dim": 16, "num_key_value_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["verify", str(tmp_path), "--tokens", "8"]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert {"prefill: 1 qkv", "prefill: 1 glu", "decode: 1 qkv"} <= {line.rpartition(": ")[0] for line in lines}
