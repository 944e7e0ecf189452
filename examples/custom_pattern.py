"""Teach one backend a kind of your own: what it is, the op that it becomes, and where it may not.

    python examples/custom_pattern.py

Gemma 2 caps its logits smoothly, `cap * tanh(x / cap)`. Say that an NPU of yours has a kernel for that. What follows
"A kind of one's own" is all that it takes: every spelling is found, for any cap, and what the op can't do is refused.

The script fails unless both spellings fuse and give eager's numbers, and the third is refused with the reason.
"""

import torch

import npu_fuse
from npu_fuse.passes.pipeline import Flow
from npu_fuse.patterns import Rule
from npu_fuse.patterns.formula import formula
from npu_fuse.patterns.rule import Capture, Function, Number
from npu_fuse.runtime.ops import OpContract

# A kind of one's own --------------------------------------------------------------------------------------------------

PATTERN = Number("cap") * Function("tanh", Number("inverse") * Capture("x"))


def check(numbers):
    if numbers["cap"] == 1:
        return ""  # a tanh, and nothing is capped
    if abs(numbers["cap"] * numbers["inverse"] - 1) > 1e-6:
        return f"x is scaled by {numbers['inverse']:g} and its tanh by {numbers['cap']:g}; a cap is the inverse"
    return None


SOFT_CAP = OpContract(
    name="my_npu::soft_cap",
    schema="soft_cap(Tensor x, float cap) -> Tensor",
    reference=lambda x, cap: (torch.tanh(x.double() / cap) * cap).to(x.dtype),
    fake=lambda x, cap: torch.empty_like(x),
    refuse=lambda target, x, cap: None if cap <= 50 else f"my_npu::soft_cap takes caps up to 50, not {cap:g}",
    socs=frozenset({"ascend910b"}),
    source="our own kernel, version 1",
)


def lower(match, edit):
    capped = edit.op(SOFT_CAP, x=match.inputs["x"], cap=match.params.numbers["cap"])
    edit.replace(match.node, capped)
    return SOFT_CAP


FLOW = Flow().with_kind(Rule("soft_cap", formula("soft_cap", PATTERN, check)), lower, SOFT_CAP)

# ----------------------------------------------------------------------------------------------------------------------


def main() -> None:
    def model(x):
        one, other = 30.0 * torch.tanh(x / 30.0), torch.tanh(x.mul(0.05)).mul(20)
        return one, other, 100 * torch.tanh(x / 100), 30 * torch.tanh(x / 20)

    backend = npu_fuse.Backend(flow=FLOW, strict=True)
    x = torch.linspace(-90, 90, 64)
    with torch.no_grad():
        for found, wanted in zip(torch.compile(model, backend=backend)(x), model(x), strict=True):
            torch.testing.assert_close(found, wanted)
    print(backend.report)
    assert backend.report.ops == {"my_npu::soft_cap": 2}
    assert backend.report.count("soft_cap") == 3  # one of them is refused
    assert [site.reason for site in backend.report.sites if site.status == "refused"] == [
        "my_npu::soft_cap takes caps up to 50, not 100"
    ]
    assert [site.reason for site in backend.report.sites if site.status == "missed"] == [
        "x is scaled by 0.05 and its tanh by 30; a cap is the inverse"
    ]


if __name__ == "__main__":
    main()
