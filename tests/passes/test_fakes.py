"""What a call gives is worked out once for all calls that look alike, and is what torch would give."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, free_unbacked_symbols

from npu_fuse.passes.fakes import Fakes

aten = torch.ops.aten


class Counted:
    """A function that counts how often it is asked."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.asked = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return self.function(*args, **kwargs)


def mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def fake(of: FakeTensorMode, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    sizes_are = StatelessSymbolicContext([DimDynamic.STATIC] * len(sizes))
    return of.from_tensor(torch.empty(*sizes, dtype=dtype), symbolic_context=sizes_are)


def looks(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [looks(part) for part in value]
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device


CALLS = {
    "a view": lambda x: (aten.view.default, (x, [2, -1]), {}),
    "a permutation": lambda x: (aten.permute.default, (x, [2, 0, 1]), {}),
    "a slice": lambda x: (aten.slice.Tensor, (x, 1, 1, 3), {}),
    "an expansion": lambda x: (aten.expand.default, (aten.unsqueeze.default(x, 0), [5, -1, -1, -1]), {}),
    "a copy": lambda x: (aten.clone.default, (x,), {"memory_format": torch.contiguous_format}),
    "a cast": lambda x: (aten._to_copy.default, (x,), {"dtype": torch.float32}),
    "a cat": lambda x: (torch.cat, ([x, x], -1), {}),
    "views of one tensor": lambda x: (aten.split.Tensor, (x, 2, 1), {}),
    "new tensors": lambda x: (aten.topk.default, (x, 2), {}),
    "an item": lambda x: (operator.getitem, ([x, x], 1), {}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_second_of_alike_calls_is_as_torch_gives_it(call: Callable[[Tensor], Any]) -> None:
    of = mode()
    fakes = Fakes(of)
    first, second = (fake(of, 2, 4, 6) for _ in range(2))
    with of:
        asked = [call(x) for x in (first, second)]
        expected = asked[1][0](*asked[1][1], **asked[1][2])
    function = Counted(asked[0][0])
    for args, kwargs in ((args, kwargs) for _, args, kwargs in asked):
        found = fakes(function, args, kwargs)
    assert function.asked == 1
    assert looks(found) == looks(expected)
    for ours, torchs in zip(_tensors(found), _tensors(expected), strict=True):
        own, lies_in_x = (t.untyped_storage()._cdata == second.untyped_storage()._cdata for t in (ours, torchs))
        assert own == lies_in_x
        assert ours.untyped_storage()._cdata != first.untyped_storage()._cdata


def _tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize(
    "other",
    [
        lambda of: fake(of, 2, 4, 8),
        lambda of: fake(of, 2, 4, 6, dtype=torch.float32),
        lambda of: fake(of, 4, 2, 6).transpose(0, 1),
        lambda of: fake(of, 3, 4, 6)[1:],
    ],
    ids=["shape", "dtype", "strides", "offset"],
)
def test_calls_that_differ_are_asked_each(other: Callable[[FakeTensorMode], Tensor]) -> None:
    of = mode()
    fakes = Fakes(of)
    function = Counted(aten.neg.default)
    with of:
        tensors = [fake(of, 2, 4, 6), other(of)]
    assert [looks(fakes(function, (x,), {})) == looks(x) or x.storage_offset() > 0 for x in tensors] == [True, True]
    assert function.asked == 2


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, -1)])
def test_numbers_of_other_types_are_other_arguments(one: float, other: float) -> None:
    of = mode()
    fakes = Fakes(of)
    x = fake(of, 2, 4, dtype=torch.int64)
    function = Counted(lambda x, number: torch.ops.aten.add.Tensor(x, number))
    given = [fakes(function, (x, number), {}) for number in (one, other)]
    assert function.asked == 2
    assert given[1].dtype == (torch.float32 if isinstance(other, float) else torch.int64)


def test_which_arguments_share_memory_is_a_difference() -> None:
    of = mode()
    fakes = Fakes(of)
    function = Counted(lambda x, y: y.view(-1))
    x, y = fake(of, 2, 4), fake(of, 2, 4)
    fakes(function, (x, x), {})
    found = fakes(function, (x, y), {})
    assert function.asked == 2
    assert found.untyped_storage()._cdata == y.untyped_storage()._cdata


def test_a_result_that_is_an_argument_is_that_argument() -> None:
    of = mode()
    fakes = Fakes(of)
    function = Counted(lambda x: x)
    x, y = fake(of, 2, 4), fake(of, 2, 4)
    assert fakes(function, (x,), {}) is x
    assert fakes(function, (y,), {}) is y
    assert function.asked == 1


def test_symbolic_sizes_are_told_apart_and_no_guard_is_installed() -> None:
    env = ShapeEnv()
    of = FakeTensorMode(shape_env=env)
    fakes = Fakes(of)
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    one, same, other = (
        of.from_tensor(torch.empty(size, 4), symbolic_context=dynamic, source=None) for size in (5, 5, 7)
    )
    function = Counted(aten.t.default)
    for x in (one, one, other, same):
        found = fakes(function, (x,), {})
        assert [str(size) for size in found.shape] == ["4", str(x.shape[0])]
        assert found.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert function.asked == len({str(x.shape[0]) for x in (one, same, other)})
    assert not env.guards


def test_sizes_that_only_the_values_tell_are_new_each_time() -> None:
    of = mode()
    fakes = Fakes(of)
    function = Counted(aten.nonzero.default)
    sizes = [fakes(function, (fake(of, 4),), {}).shape[0] for _ in range(2)]
    assert function.asked == 2
    assert all(free_unbacked_symbols(size) for size in sizes)
