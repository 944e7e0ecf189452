"""Graphs as MLIR: every op is there, by its name and arguments; writes are written; what has no form is said."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter

import pytest
import torch
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import npu_fuse
from helpers import Compiled, compiled
from npu_fuse.runtime.effects import register_side_effects
from npu_fuse.runtime.mlir.errors import MlirError
from npu_fuse.runtime.mlir.jit import Jit
from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

Tensor = torch.Tensor
# Kept: a library takes its ops with it.
_LIBRARY = torch.library.Library("mlir_test", "FRAGMENT")
SCATTER = "npu::npu_scatter_pa_kv_cache"


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register(Target())


@pytest.fixture(scope="module")
def ops() -> torch._ops._OpNamespace:
    """Ops of somebody else: one that writes its argument, one that doesn't say so, and one that writes a list."""
    library = _LIBRARY
    library.define("add_to(Tensor(a!) x, Tensor y) -> Tensor")
    library.define("add_to_all(Tensor(a!)[] xs, Tensor y) -> ()")
    library.define("undeclared(Tensor x, Tensor y) -> Tensor")

    def add_to(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x + 1

    for name, function in (
        ("add_to", add_to),
        ("undeclared", add_to),
        ("add_to_all", lambda xs, y: [x.add_(y) for x in xs] and None),
    ):
        library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake("mlir_test::add_to", lambda x, y: torch.empty_like(x), lib=library)
    torch.library.register_fake("mlir_test::undeclared", lambda x, y: torch.empty_like(x), lib=library)
    torch.library.register_fake("mlir_test::add_to_all", lambda xs, y: None, lib=library)
    register_side_effects(torch.ops.mlir_test.undeclared.default, ["x"])
    return torch.ops.mlir_test


def block(x: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    hidden = functional.rms_norm(x, weight.shape, weight, 1e-5)
    gate, value = (hidden @ up).chunk(2, -1)
    return functional.silu(gate) * value


def block_inputs(tokens: int = 6) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator) for shape in ((tokens, 16), (16,), (16, 24)))


def named(text: str) -> Counter[str]:
    """The ops in a text, by their names in torch: operators, and calls of functions that are declared."""
    declared = dict(re.findall(r'private @([\w.]+)\(.*npu_fuse\.op = "([^"]+)"', text))
    found = Counter(declared[name] for name in re.findall(r"call @([\w.]+)\(", text))
    for name in re.findall(r'torch\.operator "torch\.([\w.]+)"', text):
        found[name.replace(".", "::", 1)] += 1
    return found


@pytest.fixture(scope="module")
def a_block() -> Compiled:
    return compiled(block, *block_inputs())


@pytest.mark.parametrize("form", ["torch", "calls"])
def test_every_fused_op_is_there(a_block: Compiled, form: str) -> None:
    text = npu_fuse.export_mlir(a_block.after, form=form)
    assert named(text) == a_block.report.ops == {"npu::npu_rms_norm": 1, "npu::npu_swiglu": 1}
    assert "func.func @main(" in text


def test_calls_keep_the_names_of_arguments(a_block: Compiled) -> None:
    text = npu_fuse.export_mlir(a_block.after, form="calls")
    (norm,) = (line for line in text.splitlines() if "npu::npu_rms_norm" in line)
    assert re.search(r'vtensor<\[6,16\],f32> \{npu_fuse.name = "input"\}', norm)
    assert re.search(r'vtensor<\[16\],f32> \{npu_fuse.name = "gamma"\}', norm)
    (epsilon,) = re.findall(r"npu_fuse.argument.epsilon = (\S+) : f64", norm)
    assert float(epsilon) == pytest.approx(1e-5)
    assert "npu_fuse.argument.dim = -1 : i64" in text


def test_linalg_computes_what_the_graph_does(a_block: Compiled) -> None:
    text = npu_fuse.export_mlir(a_block.after, form="linalg")
    assert "npu" not in text.replace("npu_fuse", "")
    assert "torch." not in text
    (found,) = Jit(text)(*a_block.inputs)
    torch.testing.assert_close(found, a_block.output, rtol=1e-5, atol=1e-5)


def test_the_graph_is_untouched(a_block: Compiled) -> None:
    before = a_block.after.print_readable(print_output=False)
    for form in ("torch", "calls", "linalg"):
        npu_fuse.export_mlir(a_block.after, form=form)
    assert a_block.after.print_readable(print_output=False) == before


def test_locations_name_the_lines_of_the_model(a_block: Compiled) -> None:
    line = block.__code__.co_firstlineno + 1
    for form in ("torch", "linalg"):
        assert f'test_export.py":{line}:0' in npu_fuse.export_mlir(a_block.after, form=form, locations=True)
        assert "test_export.py" not in npu_fuse.export_mlir(a_block.after, form=form)


# Models ---------------------------------------------------------------------------------------------------------------


def test_a_model_gives_a_function_for_each_of_its_graphs() -> None:
    def broken(x: Tensor, weight: Tensor, up: Tensor) -> Tensor:
        y = block(x, weight, up)
        torch._dynamo.graph_break()
        return block(y[:, :1] * x, weight, up)

    text = npu_fuse.export_mlir(broken, *block_inputs(), options=npu_fuse.Options(disable={"glu"}))
    assert re.findall(r"func.func @(\w+)", text) == ["graph_0", "graph_1"]
    assert named(text) == {"npu::npu_rms_norm": 2}


def test_a_model_that_is_left_alone_has_no_graph() -> None:
    pair = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(MlirError, match=r"there is no graph to write: .*tensor subclass"):
        npu_fuse.export_mlir(lambda x: x * 2, pair)


def test_sizes_that_vary() -> None:
    inputs = block_inputs()
    torch._dynamo.mark_dynamic(inputs[0], 0)
    found = compiled(block, *inputs)
    text = npu_fuse.export_mlir(found.after)
    assert named(text) == found.report.ops == {"npu::npu_rms_norm": 1, "npu::npu_swiglu": 1}
    (symbol,) = re.findall(r'(%\w+) = torch.symbolic_int "s\d+" \{min_val = 2', text)
    assert text.count("torch.bind_symbolic_shape") >= 4
    assert f", [{symbol}], affine_map<()[s0] -> (s0, 12)>" in text
    assert "!torch.vtensor<[?,16],f32>" in text
    linalg = npu_fuse.export_mlir(found.after, form="linalg")
    assert "tensor<?x16xf32>" in linalg
    assert "tensor<?x12xf32>" in linalg
    with pytest.raises(MlirError, match="sizes that are not static"):
        Jit(linalg)


def test_a_size_that_is_half_of_another() -> None:
    x = torch.ones(6, 8)
    torch._dynamo.mark_dynamic(x, 1)
    text = npu_fuse.export_mlir(compiled(lambda x: x[:, : x.shape[1] // 2] * 2, x).after)
    assert "affine_map<()[s0] -> (6, s0 floordiv 2)>" in text


def test_long_constants_are_left_out_unless_they_are_asked_for() -> None:
    found = compiled(lambda x: x + torch.tensor([float(i) for i in range(40)]), torch.ones(40))
    short, long = (npu_fuse.export_mlir(found.after, constants=constants) for constants in (False, True))
    assert "dense_resource" in short
    assert re.search(r'"0x[0-9A-F]{320}', long)
    assert not re.search(r"[0-9A-F]{40}", short)


class Packed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(16, 32, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.gate(x)) * self.up(x)


def test_packed_weights_and_ranges_of_the_profiler(recwarn: pytest.WarningsRecorder) -> None:
    model = Packed()
    backend = npu_fuse.Backend(keep_graphs=True, profile_ranges=True)
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.ones(3, 16))
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    ((_, graph),) = backend.graphs
    for form in ("torch", "calls"):
        text = npu_fuse.export_mlir(graph, form=form)
        assert named(text) == {"npu::npu_swiglu": 1}
        assert "torch.aten.cat" in text
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    assert not [warning for warning in recwarn if "npu_fuse" in str(warning.message)]


# Writes ---------------------------------------------------------------------------------------------------------------


def write_pages(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    for cache, tokens in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[2:])[slots] = tokens
    return k_cache[1, 3:7] + v_cache[1, 3:7]


def page_inputs() -> tuple[Tensor, ...]:
    tokens = (torch.randn(3, 2, 32, dtype=torch.float16) for _ in range(2))
    caches = (torch.randn(4, 16, 2, 32, dtype=torch.float16) for _ in range(2))
    return *tokens, *caches, torch.tensor([3, 17, 40])


@pytest.mark.parametrize("disable", [set(), {"in_place"}])
def test_an_op_that_writes_writes_inputs(disable: set[str]) -> None:
    found = compiled(write_pages, *page_inputs(), disable=disable)
    is_functionalised = any("auto_functionalized_v2" in target for target in found.targets())
    assert is_functionalised == bool(disable)
    text = npu_fuse.export_mlir(found.after)
    assert named(text) == {SCATTER: 1}
    caches = re.findall(r"(%arg\d+): !torch.tensor<\[4,16,2,32\],f16>", text)
    assert len(caches) == 2
    assert [re.search(rf"overwrites {cache} ", text) is not None for cache in caches] == [True, True]
    (call,) = (line for line in text.splitlines() if "torch.operator" in line)
    written = re.search(r"\((%\w+), (%\w+), (%\w+), (%\w+)", call)
    assert written is not None
    for copy in written.groups()[2:]:  # the op has tensors of its own to write, and they are read after it
        assert re.search(rf"{copy} = torch.copy.to_tensor", text[: text.index(call)])
        assert re.search(rf"torch.copy.to_vtensor {copy} ", text[text.index(call) :])


def test_calls_give_the_new_values() -> None:
    text = npu_fuse.export_mlir(compiled(write_pages, *page_inputs()).after, form="calls")
    (declared,) = (line for line in text.splitlines() if "func private" in line)
    _, _, results = declared.partition(") -> (")
    assert re.findall(r'npu_fuse.name = "([\w ]+)"', results) == ["new key_cache", "new value_cache"]
    assert text.count("torch.overwrite.tensor.contents") == 2
    assert named(text) == {SCATTER: 1}


def test_references_that_only_check_values() -> None:
    given = page_inputs()
    found = compiled(write_pages, *(value.clone() for value in given))
    results = Jit(npu_fuse.export_mlir(found.after, form="linalg"))(*(_like(own, given) for own in found.inputs))
    wanted = write_pages(*given), *given[2:4]
    assert sorted(tuple(value.shape) for value in results) == sorted(tuple(value.shape) for value in wanted)
    for value in wanted:
        assert any(value.shape == result.shape and torch.equal(value, result) for result in results)


def test_tensors_that_a_graph_holds() -> None:
    q, k, v = (torch.randn(1, 2, 8, 64, dtype=torch.float16) for _ in range(3))
    found = compiled(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    assert found.after.graph.find_nodes(op="get_attr")
    text = npu_fuse.export_mlir(found.after, form="linalg", constants=True)
    torch.testing.assert_close(Jit(text)(*found.inputs)[0], found.output, rtol=2**-10, atol=2**-10)
    for device, inputs in (("cpu", 3), ("meta", 4)):  # without values they stay inputs
        for name in {str(node.target) for node in found.after.graph.find_nodes(op="get_attr")}:
            setattr(found.after, name, getattr(found.after, name).to(device))
        (function,) = (line for line in npu_fuse.export_mlir(found.after).splitlines() if "func.func" in line)
        assert function.partition("->")[0].count("%arg") == inputs


def test_a_tensor_that_two_calls_read() -> None:
    def model(q: torch.Tensor) -> torch.Tensor:
        once = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return torch.nn.functional.scaled_dot_product_attention(once, q, q, is_causal=True)

    q = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)
    assert npu_fuse.export_mlir(model, q, form="calls").count("call @npu.npu_fused_infer_attention_score") == 2


def test_a_step_over_a_static_cache() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32, "head_dim": 16}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    cache = StaticCache(config=config, max_cache_len=16)
    backend = npu_fuse.Backend(keep_graphs=True)
    given: list[tuple[object, ...]] = []

    def keeping(module: torch.fx.GraphModule, inputs: list[object]) -> object:
        compiled_graph = backend(module, inputs)

        def run(*values: object) -> object:
            given.append(tuple(value.clone() if isinstance(value, Tensor) else value for value in values))
            return compiled_graph(*values)

        return run

    with torch.no_grad():
        model(torch.tensor([[1, 2, 5]]), past_key_values=cache)
        through = torch.compile(model, backend=keeping, fullgraph=True)
        logits = through(torch.tensor([[3]]), past_key_values=cache).logits
    ((_, graph),) = backend.graphs
    found = {name: count for name, count in named(npu_fuse.export_mlir(graph)).items() if name in CONTRACTS}
    assert found == backend.report.ops
    assert found["sgl_kernel_npu::split_qkv_rmsnorm_rope"] == 1
    results = Jit(npu_fuse.export_mlir(graph, form="linalg", constants=True))(*given[0])
    (layer,) = cache.layers
    for wanted in (logits, layer.keys, layer.values):
        off_by = [(result - wanted).abs().max() for result in results if result.shape == wanted.shape]
        assert min(off_by) < 1e-5


def _like(own: Tensor, given: tuple[Tensor, ...]) -> Tensor:
    """The input of a graph among those of its call, by what it held before the call."""
    same = [value for value in given if value.shape == own.shape and value.dtype == own.dtype]
    return max(same, key=lambda value: int((value == own).sum()))


def update(x: Tensor, cache: Tensor, rows: Tensor) -> Tensor:
    cache[rows] = x
    cache[:, :2].mul_(2)
    return cache.sum(0)


def test_writes_of_torchs_own_are_results_in_linalg() -> None:
    given = torch.arange(12.0).reshape(3, 4), torch.ones(5, 4), torch.tensor([4, 0, 2])
    found = compiled(update, *(value.clone() for value in given))
    text = npu_fuse.export_mlir(found.after, form="linalg")
    assert re.search(r"npu_fuse.new_values_of_inputs = \[(\d)\]", text)
    cache = given[1].clone()
    wanted = update(given[0], cache, given[2])
    summed, new = Jit(text)(*(_like(own, given) for own in found.inputs))
    assert torch.equal(summed, wanted)
    assert torch.equal(new, cache)
    assert torch.equal(given[1], torch.ones(5, 4)), "a call writes nothing"


@pytest.mark.parametrize("name", ["add_to", "undeclared"])
def test_ops_of_others_that_write(ops: torch._ops._OpNamespace, name: str) -> None:
    op = getattr(ops, name)

    def through_a_view(x: Tensor, y: Tensor) -> Tensor:
        return op(x[1:], y) + x[1:]

    found = compiled(through_a_view, torch.ones(4, 3), torch.ones(3, 3))
    text = npu_fuse.export_mlir(found.after)
    assert named(text) == {f"mlir_test::{name}": 1}
    assert "torch.overwrite.tensor.contents" in text
    assert "slice_scatter" in text
    with pytest.raises(MlirError, match=f"mlir_test.{name}.default is no op of torch's own"):
        npu_fuse.export_mlir(found.after, form="linalg")


def test_a_convolution_called_by_hand_writes_its_states() -> None:
    def by_hand(x: Tensor, weight: Tensor, states: Tensor) -> Tensor:
        return torch.ops.npu.causal_conv1d(x, weight, states, run_mode=1) + states.sum()

    half = torch.float16
    inputs = torch.ones(2, 1, 16, dtype=half), torch.ones(4, 16, dtype=half), torch.ones(2, 3, 16, dtype=half)
    text = npu_fuse.export_mlir(by_hand, *inputs)
    assert named(text) == {"npu::causal_conv1d": 1}
    assert "overwrites %arg" in text


# What has no form -----------------------------------------------------------------------------------------------------


def test_a_list_that_is_written(ops: torch._ops._OpNamespace) -> None:
    def in_a_list(x: Tensor, y: Tensor) -> Tensor:
        ops.add_to_all([x, y], x)
        return x + y

    with pytest.raises(MlirError, match="writes a list of tensors"):
        npu_fuse.export_mlir(in_a_list, torch.ones(3), torch.ones(3))


def test_references_that_read_values() -> None:
    def by_hand(x: Tensor, weight: Tensor, states: Tensor, slots: Tensor) -> Tensor:
        return torch.ops.npu.causal_conv1d(x, weight, states, cache_indices=slots, run_mode=1)

    half = torch.float16
    inputs = torch.ones(2, 1, 16, dtype=half), torch.ones(4, 16, dtype=half), torch.ones(2, 3, 16, dtype=half)
    with pytest.raises(MlirError, match=r"^the reference of npu::causal_conv1d reads values of tensors, which a graph"):
        npu_fuse.export_mlir(by_hand, *inputs, torch.tensor([1, 0]), form="linalg")


def test_an_unknown_form(a_block: Compiled) -> None:
    with pytest.raises(ValueError, match="unknown form 'llvm'; known: torch, calls, linalg"):
        npu_fuse.export_mlir(a_block.after, form="llvm")


def test_without_the_package(a_block: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MlirError, match=r'torch-mlir is not installed.*pip install "npu_fuse\[mlir\]"'):
        npu_fuse.export_mlir(a_block.after)


def test_every_op_that_writes_has_a_form() -> None:
    """None of them gives back what it writes by its schema, or writes a list."""
    for contract in CONTRACTS.values():
        assert all(result.alias_info is None for result in contract.parsed_schema.returns)
        written = [argument for argument in contract.parsed_schema.arguments if argument.name in contract.mutates]
        assert {str(argument.type) for argument in written} <= {"Tensor"}


def test_two_writes_of_one_value_stay_two(ops: torch._ops._OpNamespace) -> None:
    """Copies that are written apart are not one copy, alike though they are before."""

    def apart(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        one, other = x.clone(), x.clone()
        ops.add_to(one, y)
        ops.add_to(other, y)
        return one, other

    text = npu_fuse.export_mlir(apart, torch.ones(3), torch.ones(3))
    first, second = re.findall(r"(%\d+) = torch.copy.to_tensor", text)
    assert len(re.findall(rf"torch.operator.*\({first},|torch.operator.*\({second},", text)) == 2
    assert f"torch.copy.to_vtensor {first} " in text
    assert f"torch.copy.to_vtensor {second} " in text
