"""The compile cache: what a second start takes from it, what it doesn't, and that nobody sees a difference."""

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept_models
import pytest
import torch
from kept_models import AttentionType, Cached, Causal, Declared, Mlp, seeded
from torch import nn

import npu_fuse
from npu_fuse.runtime.cache import files, key
from npu_fuse.runtime.cache.encoding import NotKept, Unreadable, decode, encode, encode_function

Tensor = torch.Tensor


def start(folder: object, model: nn.Module, *inputs: Any, dynamic: bool | None = None, **settings: Any) -> Any:
    """A start of its own, as far as compiling goes: the backend, what was compiled, and its result."""
    torch._dynamo.reset()
    backend = npu_fuse.Backend(cache=folder, strict=True, keep_graphs=True, **settings)
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        return backend, compiled, compiled(*inputs)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "npu_fuse"]


def qkv(tokens: int = 6) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 4, tokens, 16) for _ in range(3)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]], bool | None]] = {
    "packed weights": (lambda: seeded(Mlp), lambda: [torch.randn(3, 16)], None),
    "sizes that vary": (lambda: seeded(Mlp), lambda: [torch.randn(2, 3, 16)], True),
    "a constant": (lambda: seeded(Causal), qkv, None),
    "a write in place": (lambda: seeded(Cached), lambda: [torch.randn(4, 2, 16), torch.tensor([1, 5])], None),
    "a declaration": (lambda: seeded(Declared, AttentionType.ENCODER_ONLY), qkv, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_second_start_does_as_the_first(tmp_path: Path, name: str) -> None:
    make, inputs, dynamic = MODELS[name]
    given = inputs()
    first, _, wanted = start(tmp_path, make(), *given, dynamic=dynamic)
    second, compiled, found = start(tmp_path, make(), *given, dynamic=dynamic)
    assert (first.report.cache, second.report.cache) == ("1 kept", "1 taken")
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()
    assert list(second.report.seconds_by_pass) == ["cache"]
    for field in ("sites", "ops", "launches_before", "launches_after", "bytes_before", "bytes_after"):
        assert getattr(second.report, field) == getattr(first.report, field)
    assert first.report.ops
    (before, after), (same_before, same_after) = first.graphs[0], second.graphs[0]
    assert (same_before.code, same_after.code) == (before.code, after.code)
    for a, b in zip(after.graph.nodes, same_after.graph.nodes, strict=True):
        assert a.name == b.name
        assert a.meta.get("npu_fuse") == b.meta.get("npu_fuse")
        assert str(a.meta.get("val")) == str(b.meta.get("val"))
    if dynamic:
        with torch.no_grad():
            other = torch.randn(5, 7, 16)
            torch.testing.assert_close(compiled(other), make()(other))
        assert len(second.reports) == 1


def test_weights_are_those_of_the_model_and_stay_so(tmp_path: Path) -> None:
    x = torch.randn(3, 16)
    start(tmp_path, seeded(Mlp), x)
    model = seeded(Mlp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        backend, compiled, found = start(tmp_path, model, x)
        assert backend.report.cache == "1 taken"
        torch.testing.assert_close(found, model(x))
        assert model.gate.weight.untyped_storage()._cdata == model.up.weight.untyped_storage()._cdata
        model.gate.weight.mul_(2)  # in place, in the packed memory
        torch.testing.assert_close(compiled(x), model(x))
        model.up.weight.data = torch.randn(32, 16)  # moved again
        torch.testing.assert_close(compiled(x), model(x))
        assert model.gate.weight.untyped_storage()._cdata == model.up.weight.untyped_storage()._cdata


def test_weights_that_may_not_be_moved_are_another_compilation(tmp_path: Path) -> None:
    x = torch.randn(3, 16)
    start(tmp_path, seeded(Mlp), x)
    model = seeded(Mlp)
    held = model.gate.weight.detach()
    backend, _, found = start(tmp_path, model, x)
    assert backend.report.cache == "1 kept"
    assert "npu::npu_swiglu" not in backend.report.ops
    assert model.gate.weight.data_ptr() == held.data_ptr()
    torch.testing.assert_close(found, model(x))


def test_what_is_compiled_is_told_apart(tmp_path: Path) -> None:
    x = torch.randn(3, 16)
    others: list[tuple[nn.Module, Tensor, dict[str, Any]]] = [
        (seeded(Mlp), x, {}),
        (seeded(Mlp, 1e-5), x, {}),
        (seeded(Mlp).double(), x.double(), {}),
        (seeded(Mlp), torch.randn(4, 16), {}),
        (seeded(Mlp), torch.randn(16, 3).t(), {}),
        (seeded(Mlp), x, {"disable": {"rms_norm"}}),
        (seeded(Mlp), x, {"pack_weights": False}),
        (seeded(Mlp), x, {"numerics": "exact"}),
        (seeded(Mlp), x, {"encoder_only": ("layers.*",)}),
        (seeded(Mlp), x, {"target": npu_fuse.Target("ascend310p")}),
        (seeded(Mlp), x, {"target": npu_fuse.Target(packages={"torch_npu": "2.13.0"})}),
    ]
    for model, given, settings in others:
        backend, _, found = start(tmp_path, model, given, **settings)
        assert backend.report.cache == "1 kept", settings
        torch.testing.assert_close(found, model(given))
    for eps in (1e-6, 1e-5):
        assert start(tmp_path, seeded(Mlp, eps), x)[0].report.cache == "1 taken"


def test_a_constant_is_told_by_its_content(tmp_path: Path) -> None:
    class Shifted(nn.Module):
        def __init__(self, shift: list[float]) -> None:
            super().__init__()
            self.norm, self.shift = nn.RMSNorm(4), shift

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) + torch.tensor(self.shift)

    x = torch.randn(3, 4)
    for shift in ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 5.0]):
        backend, _, found = start(tmp_path, seeded(Shifted, shift), x)
        assert backend.report.cache == "1 kept"
        torch.testing.assert_close(found, seeded(Shifted, shift)(x))


def test_what_a_module_declares_is_asked_and_guarded_again(tmp_path: Path) -> None:
    given = qkv()
    start(tmp_path, seeded(Declared, AttentionType.ENCODER_ONLY), *given)
    model = seeded(Declared, AttentionType.ENCODER_ONLY)
    backend, compiled, found = start(tmp_path, model, *given)
    torch.testing.assert_close(found, nn.functional.scaled_dot_product_attention(*given))
    model.attn_type = AttentionType.DECODER
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), model(*given))
    assert [report.cache for report in backend.reports] == ["taken", "kept"]
    _, _, found = start(tmp_path, seeded(Declared, AttentionType.DECODER), *given)
    torch.testing.assert_close(found, model(*given))


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a start has kept."""
    folder = tmp_path_factory.mktemp("kept")
    start(folder, seeded(Mlp), torch.randn(3, 16))
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize("what", ["torch", "op schemas"])
def test_an_entry_that_is_out_of_date_is_told_of_and_replaced(
    tmp_path: Path, entry: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = files.unpack(entry.read_bytes())
    content["compiler"][what] = "0.9"
    (tmp_path / entry.name).write_bytes(files.pack(content))
    with caplog.at_level(logging.WARNING, logger="npu_fuse"):
        backend, _, _ = start(tmp_path, seeded(Mlp), torch.randn(3, 16))
    (line,) = told(caplog)
    assert f"is ignored: it is out of date: made by {what} 0.9, here " in line
    assert backend.report.cache == "1 kept"
    assert files.unpack((tmp_path / entry.name).read_bytes())["compiler"] == key.compiler(npu_fuse.Target.detect())


def _changed(content: dict[str, Any], old: str, new: str) -> bytes:
    assert old in content["text"]
    return files.pack({**content, "text": content["text"].replace(old, new)})


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing in it": (lambda _: b"", "not those that were written"),
    "cut off": (lambda data: data[: len(data) // 2], "not those that were written"),
    "a bit": (lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "not those that were written"),
    "no entry": (lambda _: files.pack([1]), "it is no entry"),  # type: ignore[arg-type]
    "half an entry": (lambda _: files.pack({"text": "{}"}), "KeyError"),
    "an op that isn't there": (
        lambda data: _changed(files.unpack(data), "op npu::npu_swiglu default", "op npu::npu_swiglow default"),
        "calls 'op npu::npu_swiglow default', which is not there",
    ),
    "a function of no one's": (
        lambda data: _changed(files.unpack(data), "own runtime.weights pack", "own os system"),
        "calls 'own os system', which is not there",
    ),
    "another shape": (
        lambda data: _changed(files.unpack(data), '["3", "16"], ["16", "1"]', '["3", "16"], ["1", "3"]'),
        "here, and was",
    ),
    "a node that isn't there": (
        lambda data: _changed(files.unpack(data), '{"node": "arg0_1"}', '{"node": "arg9_1"}'),
        "KeyError",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_an_entry_that_is_broken_is_told_of_and_replaced(
    tmp_path: Path, entry: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, reason = BROKEN[how]
    file = tmp_path / entry.name
    file.write_bytes(damage(entry.read_bytes()))
    x, model = torch.randn(3, 16), seeded(Mlp)
    with caplog.at_level(logging.WARNING, logger="npu_fuse"):
        backend, _, found = start(tmp_path, model, x)
    (line,) = told(caplog)
    assert reason in line
    assert backend.report.cache == "1 kept"
    torch.testing.assert_close(found, model(x))
    assert files.unpack(file.read_bytes()).keys() == {"compiler", "text", "constants"}


def test_two_processes_may_write_at_once(tmp_path: Path) -> None:
    script = Path(kept_models.__file__)
    processes = [
        subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert ["1", "kept"] in [line[:2] for line in said]
    for lines in said:
        assert lines[2:] == ["1", "taken"] * 2
    assert [file.suffix for file in tmp_path.iterdir()] == [".npu_fuse"]  # one entry, and nothing half written
    # What they wrote is taken by a third.
    third = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120, check=True)
    assert third.stdout.split() == ["1", "taken"] * 3


def test_a_graph_that_cannot_be_told_is_not_kept(tmp_path: Path) -> None:
    x = torch.randn(3, 16)
    backend, _, _ = start(tmp_path, seeded(Mlp), x, encoder_only=lambda path, kind: False)
    assert backend.report.cache == "1 not kept: Options.encoder_only is a function, whose text is not known"
    assert "cache: not kept" in backend.reports[0].summary()
    assert "npu::npu_rms_norm" in backend.report.ops
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    backend, _, _ = start(tmp_path / "file" / "folder", seeded(Mlp), torch.randn(3, 16))
    assert backend.report.cache.startswith("1 not kept: ")
    assert "npu::npu_rms_norm" in backend.report.ops


def test_it_is_off_until_it_is_switched_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPU_FUSE_CACHE", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert files.folder_of(npu_fuse.Options().cache) is None
    assert files.folder_of(True) == tmp_path / "npu_fuse"
    for said, folder in (("0", None), ("1", tmp_path / "npu_fuse"), ("/some/where", Path("/some/where"))):
        monkeypatch.setenv("NPU_FUSE_CACHE", said)
        assert files.folder_of(npu_fuse.Options().cache) == folder
    with torch.compiler.config.patch(force_disable_caches=True):
        assert files.folder_of(True) is None


VALUES = [
    *(None, True, 3, -0.5, float("inf"), "text", [1, [2]], (1, (2,), []), slice(None, 4), {"a": (1,), 2: [None]}),
    *(torch.bfloat16, torch.device("cpu"), torch.strided, torch.channels_last, torch.ops.aten.add.Tensor),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_what_is_encoded_is_decoded(value: object) -> None:
    found = decode(encode(value), {})
    assert found == value
    assert type(found) is type(value)


def test_what_has_no_form_is_not_kept() -> None:
    @dataclasses.dataclass
    class Thing:
        pass

    for value in (Thing(), torch.ones(2), {1, 2}, 1j, AttentionType.DECODER):
        with pytest.raises(NotKept, match="there is no form"):
            encode(value)
    for function in (lambda: None, Mlp, torch.ops.higher_order.cond, torch.add):
        with pytest.raises(NotKept):
            encode_function(function)
    with pytest.raises(Unreadable):
        decode({"pickle": "gASV"}, {})
