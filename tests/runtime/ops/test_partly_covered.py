"""A contract that covers a part of its op's schema: the rest is bound, and has to keep its defaults."""

import inspect

import pytest
import torch

from npu_fuse.runtime.ops.partly_covered import PartlyCovered
from npu_fuse.runtime.target import Target

PART = PartlyCovered(
    "npu_fuse_test::scaled",
    'scaled(Tensor x, float factor, *, Tensor? bias=None, int mode=3, str kind="a", int[]? sizes=None) -> Tensor',
    lambda x, factor, kind: (x, factor, kind),
)


@PART.kernel
def reference(call):
    """Scales."""
    return call


@PART.refuse
def refuse(target, call):
    """Judges."""
    if call[2] != "a":
        yield f"kind is {call[2]!r} on {target.soc}"


def test_a_kernel_takes_all_arguments_and_passes_on_the_covered_ones():
    x = torch.ones(2)
    assert reference(x, 2.0) == (x, 2.0, "a")
    assert reference(x, factor=2.0, kind="b", mode=3, bias=None, sizes=None) == (x, 2.0, "b")
    with pytest.raises(TypeError):
        reference(x)
    with pytest.raises(TypeError):
        reference(x, 2.0, None)


def test_signatures_and_docstrings_are_those_of_the_whole_and_of_the_part():
    assert str(inspect.signature(reference)) == "(x, factor, *, bias=None, mode=3, kind='a', sizes=None)"
    assert list(inspect.signature(refuse).parameters) == ["target", "x", "factor", "bias", "mode", "kind", "sizes"]
    assert (reference.__name__, reference.__doc__) == ("reference", "Scales.")


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"bias": torch.ones(2)}, "bias is given (npu_fuse supports its default alone, None)"),
        ({"mode": 4}, "mode is 4 (npu_fuse supports its default alone, 3)"),
        ({"sizes": [1]}, "sizes is [1] (npu_fuse supports its default alone, None)"),
    ],
)
def test_an_argument_that_is_not_covered_is_named(argument, reason):
    with pytest.raises(ValueError, match=r"npu_fuse_test::scaled: ") as raised:
        reference(torch.ones(2), 2.0, **argument)
    assert str(raised.value) == f"npu_fuse_test::scaled: {reason}"
    given = {"x": torch.ones(2), "factor": 2.0, "bias": None, "mode": 3, "kind": "a", "sizes": None}
    assert refuse(Target(), **given | argument) == reason
    assert refuse(Target(), **given) is None


def test_reasons_about_what_is_covered_come_second():
    given = {"x": torch.ones(2), "factor": 2.0, "bias": None, "mode": 3, "kind": "b", "sizes": None}
    assert refuse(Target("ascend310p"), **given) == "kind is 'b' on ascend310p"
    assert "mode is 4" in refuse(Target("ascend310p"), **given | {"mode": 4})
