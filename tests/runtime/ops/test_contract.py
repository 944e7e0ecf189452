"""Contracts as data: names, schemas and functions fit each other, and calls are bound as torch would bind them."""

import inspect

import pytest
import torch

from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.ops.rotary import NPU_ROTARY_MUL
from npu_fuse.runtime.target import SOCS, Target

# What ops write without saying so.
UNDECLARED = {
    "npu::causal_conv1d": ["conv_states"],
    "npu::npu_kv_rmsnorm_rope_cache": ["k_cache", "ckv_cache"],
}


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS)
class TestEachContract:
    def test_names_fit(self, contract):
        schema = contract.parsed_schema
        assert schema.name == contract.name
        assert CONTRACTS[contract.name] is contract
        assert contract.source
        assert contract.socs <= set(SOCS)

    def test_mutates_is_what_the_schema_says(self, contract):
        written = [argument.name for argument in contract.parsed_schema.arguments if argument.is_write]
        assert list(contract.mutates) == written + UNDECLARED.get(contract.name, [])

    def test_functions_take_the_schemas_arguments(self, contract):
        arguments = {argument.name: argument for argument in contract.parsed_schema.arguments}
        for function in (contract.reference, contract.fake):
            parameters = inspect.signature(function).parameters
            assert list(parameters) == list(arguments)
            for name, parameter in parameters.items():
                has_default = parameter.default is not inspect.Parameter.empty
                assert has_default == arguments[name].has_default_value()
                assert not has_default or parameter.default == arguments[name].default_value
        assert list(inspect.signature(contract.refuse).parameters) == ["target", *arguments]

    def test_op_is_the_registered_overload(self, contract):
        assert str(contract.op._schema) == str(contract.parsed_schema)
        assert torch.Tag.pt2_compliant_tag in contract.op.tags


def test_bind_fills_in_defaults_in_the_schemas_order():
    x, cos, sin = torch.ones(3, 1, 5, 2).unbind()
    bound = NPU_ROTARY_MUL.bind(x, r2=sin, r1=cos)
    assert list(bound) == ["input", "r1", "r2", "rotary_mode", "rotate"]
    assert bound["r1"] is cos
    assert bound["rotary_mode"] == "half"
    assert bound["rotate"] is None


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([], {}, "argument 'input' is missing"),
        (["x", "x"], {}, "argument 'input' is no tensor but 'x'"),
        ([torch.ones(1)], {"input": torch.ones(1)}, "'input' given twice"),
        ([torch.ones(1)], {"cos": torch.ones(1)}, "has no argument 'cos'"),
        ([torch.ones(1)] * 6, {}, "takes 5 arguments, got 6"),
    ],
)
def test_calls_that_do_not_fit_the_schema(args, kwargs, message):
    with pytest.raises(TypeError, match=message) as raised:
        NPU_ROTARY_MUL.refusal(Target(), *args, **kwargs)
    assert NPU_ROTARY_MUL.schema in str(raised.value)


def test_a_missing_soc_is_named_with_those_that_have_the_kernel():
    x = torch.ones(5, 1, 2)
    assert NPU_ROTARY_MUL.refusal(Target("ascend950"), x, x, x) == (
        "npu::npu_rotary_mul has no kernel on ascend950 (it has one on ascend310p, ascend910_93, ascend910b)"
    )
