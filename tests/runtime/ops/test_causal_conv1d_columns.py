"""causal_conv1d_columns against a simulation token by token in float64, and the limits of the kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.conv_state import in_pool_memory
from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.ops.causal_conv1d_columns import CAUSAL_CONV1D_COLUMNS, _on_device
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

TARGET = Target("ascend910b")
BRAIN, HALF = torch.bfloat16, torch.float16


def drawn(*shape: int, dtype: torch.dtype = BRAIN, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call(batch: int = 2, tokens: int = 1, dim: int = 16, width: int = 4, columns: int = 4, **given: object) -> dict:
    return {
        "x": drawn(batch, tokens, dim, seed=1),
        "weight": drawn(width, dim, seed=2),
        "states": in_pool_memory(drawn(batch, dim, columns, seed=3)),
        "bias": drawn(dim, seed=4),
        "has_initial_state": None,
        "reads_states": True,
        "activation_mode": 1,
        **given,
    }


def simulated(given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs in float64, one token after the other, and the states."""
    weight, states = given["weight"].double(), given["states"]
    outputs, kept = [], []
    for index, tokens in enumerate(given["x"]):
        flags = given["has_initial_state"]
        counts = given["reads_states"] and (flags is None or bool(flags[index]))
        seen = list((states[index] if counts else torch.zeros_like(states[index])).unbind(-1))
        row = []
        for token in tokens:
            seen.append(token)
            total = torch.zeros(len(token), dtype=torch.float64)
            if given["bias"] is not None:
                total += given["bias"].double()
            for age in range(len(weight)):
                total += weight[-1 - age] * seen[-1 - age].double()
            row.append(total * torch.sigmoid(total) if given["activation_mode"] else total)
        outputs.append(torch.stack(row))
        kept.append(torch.stack(seen[len(seen) - states.shape[-1] :], -1))
    return torch.stack(outputs), torch.stack(kept)


@pytest.fixture(autouse=True)
def _registered() -> None:
    register(TARGET, CONTRACTS.values())


@pytest.mark.parametrize("run", [CAUSAL_CONV1D_COLUMNS.reference, _on_device], ids=["reference", "device"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_outputs_and_states_token_by_token(run, data: st.DataObject) -> None:
    """What runs on the device is the kernel of causal_conv1d and what is around it; here that is its reference."""
    width = data.draw(st.integers(2, 4))
    batch, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    columns = width - 1 + data.draw(st.integers(0, 4))
    given = call(batch, tokens, 16, width, columns, activation_mode=data.draw(st.integers(0, 1)))
    given["reads_states"] = data.draw(st.booleans())
    if given["reads_states"] and data.draw(st.booleans()):
        flags = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
        given["has_initial_state"] = torch.tensor(flags)
    if data.draw(st.booleans()):
        given["bias"] = None
    outputs, states = simulated(given)
    found = run(**given)
    assert found.dtype == BRAIN
    torch.testing.assert_close(found.double(), outputs, rtol=1e-2, atol=1e-2)
    assert torch.equal(given["states"], states)


def test_a_call_that_is_taken() -> None:
    for dtype in (BRAIN, HALF):
        given = call(dim=32, tokens=3)
        tensors = {name: value.to(dtype) for name, value in given.items() if isinstance(value, torch.Tensor)}
        assert CAUSAL_CONV1D_COLUMNS.refusal(TARGET, **{**given, **tensors}) is None


REFUSED = {
    "float32": (lambda: {n: v.float() for n, v in call().items() if isinstance(v, torch.Tensor)}, "x is float32"),
    "width 5": (lambda: call(width=5, columns=5), "width 5"),
    "width 1": (lambda: call(width=1), "width 1"),
    "24 channels": (lambda: call(dim=24), "24 channels, not known to be a multiple of 16"),
    "too short a state": (lambda: call(columns=2), "is not known to hold the 3 tokens"),
    "another batch": (lambda: call(states=in_pool_memory(drawn(3, 16, 4))), "one for each of 2 sequences"),
    "states of two axes": (lambda: call(states=drawn(2, 16)), "states has 2 dims [2, 16] (the kernel takes 3)"),
    "columns side by side": (lambda: call(states=drawn(2, 16, 4)), "channels don't lie side by side"),
    "two axes": (lambda: call(x=drawn(2, 16)), "x has 2 dims [2, 16] (the kernel takes 3)"),
    "flags of no state": (
        lambda: call(has_initial_state=torch.ones(2).bool(), reads_states=False),
        "no states are read",
    ),
    "another dtype": (lambda: call(states=in_pool_memory(drawn(2, 16, 4, dtype=HALF))), "they must be equal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    given, reason = REFUSED[name]
    said = CAUSAL_CONV1D_COLUMNS.refusal(TARGET, **given())
    assert said is not None
    assert reason in said


def test_columns_are_static(symbolic) -> None:
    states = symbolic((2, "S", 16), BRAIN)
    states = torch.cat([states, states], 1).transpose(1, 2)  # 4 or more
    said = CAUSAL_CONV1D_COLUMNS.refusal(TARGET, **call(states=states))
    assert said == f"the number of columns of states [2, 16, {states.shape[2]}] is not static"


def test_a_package_without_the_modes_is_too_old() -> None:
    old, new = (Target("ascend910b", "npu", {"sgl_kernel_npu": version}) for version in ("2026.7.0", "2026.7.1"))
    assert "has no causal_conv1d with a run_mode, 2026.7.1 brought it" in CAUSAL_CONV1D_COLUMNS.refusal(old, **call())
    assert CAUSAL_CONV1D_COLUMNS.refusal(new, **call()) is None


def test_a_call_that_is_undefined_is_an_error() -> None:
    with pytest.raises(ValueError, match="width 5"):
        CAUSAL_CONV1D_COLUMNS.reference(**call(width=5, columns=5))
