"""Functions of sgl_kernel_npu are called with what our ops are called with."""

import inspect

import pytest

from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.ops.sgl_kernel import SglFunction

WRAPPED = {name: contract for name, contract in CONTRACTS.items() if contract.device_kernel is not None}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_function_takes_the_arguments_of_its_op(name):
    contract = WRAPPED[name]
    arguments = tuple(argument.name for argument in contract.parsed_schema.arguments)
    kernel = contract.device_kernel
    taken = kernel.parameters if isinstance(kernel, SglFunction) else tuple(inspect.signature(kernel).parameters)
    assert taken == arguments
