"""Registration adds what is missing, keeps what is there, and refuses to speak of another schema."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from npu_fuse.runtime.ops import CONTRACTS, OpContract
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key


def contract_of(name: str, device_kernel: Callable[..., torch.Tensor] | None = None) -> OpContract:
    return OpContract(
        name=f"npu_fuse_test::{name}",
        schema=f"{name}(Tensor x, float epsilon=1e-06) -> Tensor",
        reference=lambda x, epsilon=1e-06: x + 1,
        fake=lambda x, epsilon=1e-06: x.new_empty(x.shape),
        refuse=lambda target, x, epsilon: None,
        socs=frozenset({"ascend910b"}),
        source="a package 1.0",
        device_kernel=device_kernel,
    )


@pytest.fixture
def elsewhere():
    """A library of someone else's, in which the op was registered before us."""
    library = torch.library.Library("npu_fuse_test", "FRAGMENT")
    yield library
    library._destroy()


def test_a_second_call_changes_nothing():
    overloads = {name: contract.op for name, contract in CONTRACTS.items()}
    register(Target())
    assert {name: contract.op for name, contract in CONTRACTS.items()} == overloads


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_op_has_its_kernels(name):
    gc.collect()
    assert all(HAS_KERNEL(name, key) for key in ("CPU", "CUDA", "Meta"))


def test_only_ops_of_our_own_get_a_device_kernel():
    with_kernel = {name for name in CONTRACTS if HAS_KERNEL(name, "PrivateUse1")}
    assert with_kernel == {name for name, contract in CONTRACTS.items() if contract.device_kernel is not None}
    assert all(name.startswith(("sgl_kernel_npu::", "npu_fuse::")) for name in with_kernel)


def test_an_unregistered_op_says_what_to_call():
    with pytest.raises(RuntimeError, match="npu_fuse_test::nowhere is not registered; call npu_fuse"):
        _ = contract_of("nowhere").op


def test_a_missing_op_is_defined():
    contract = contract_of("missing", device_kernel=lambda x, epsilon=1e-06: x)
    register(Target(), [contract])
    register(Target(), [contract])
    assert contract.op(torch.zeros(2)).tolist() == [1, 1]
    assert contract.op(torch.zeros(2, device="meta")).shape == (2,)
    assert HAS_KERNEL(contract.name, "PrivateUse1")


def test_kernels_that_are_there_are_kept(elsewhere):
    contract = contract_of("complete")
    elsewhere.define(contract.schema)
    elsewhere.impl("complete", lambda x, epsilon=1e-06: x - 1, "CPU")
    elsewhere.impl("complete", lambda x, epsilon=1e-06: x.new_empty(5), "Meta")
    register(Target(), [contract])
    assert contract.op(torch.zeros(2)).tolist() == [-1, -1]
    assert contract.op(torch.zeros(2, device="meta")).shape == (5,)


def test_kernels_that_are_missing_are_added(elsewhere):
    contract = contract_of("bare")
    elsewhere.define(contract.schema)
    register(Target(), [contract])
    assert contract.op(torch.zeros(2)).tolist() == [1, 1]
    assert contract.op(torch.zeros(2, device="meta")).shape == (2,)


def test_a_composite_kernel_serves_everything(elsewhere):
    contract = contract_of("composite")
    elsewhere.define(contract.schema)
    elsewhere.impl("composite", lambda x, epsilon=1e-06: x - 1, "CompositeImplicitAutograd")
    register(Target(), [contract])
    assert contract.op(torch.zeros(2)).tolist() == [-1, -1]
    assert not HAS_KERNEL(contract.name, "CPU")


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("other_name", "(Tensor self, float epsilon=1e-06) -> Tensor"),
        ("other_type", "(Tensor? x, float epsilon=1e-06) -> Tensor"),
        ("other_default", "(Tensor x, float epsilon=1e-05) -> Tensor"),
        ("other_order", "(float epsilon, Tensor x) -> Tensor"),
        ("other_results", "(Tensor x, float epsilon=1e-06) -> (Tensor, Tensor)"),
        ("other_keyword", "(Tensor x, *, float epsilon=1e-06) -> Tensor"),
        ("other_effect", "(Tensor(a!) x, float epsilon=1e-06) -> Tensor"),
        ("one_more", "(Tensor x, float epsilon=1e-06, int dim=-1) -> Tensor"),
    ],
)
def test_another_schema_is_an_error_that_names_both(elsewhere, name, signature):
    elsewhere.define(name + signature)
    contract = contract_of(name)
    with pytest.raises(RuntimeError) as raised:
        register(Target(packages={"torch_npu": "2.99"}), [contract])
    message = str(raised.value)
    assert f"registered: {getattr(torch.ops.npu_fuse_test, name).default._schema}" in message
    assert f"expected:   {contract.parsed_schema}" in message
    assert "a package 1.0" in message
    assert "torch_npu 2.99" in message


def test_importing_registers_nothing_and_loads_no_vendor_package():
    program = """
import json, sys
import torch
from npu_fuse.runtime.ops import CONTRACTS
import npu_fuse.runtime.ops.register
roots = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([sorted(CONTRACTS.keys() & set(torch._C._dispatch_get_all_op_names())), sorted(roots)]))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    registered, roots = json.loads(result.stdout)
    assert registered == []
    assert not {"torch_npu", "sgl_kernel_npu", "transformers", "torchair"} & set(roots)
