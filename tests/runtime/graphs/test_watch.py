"""Whatever way a weight is replaced, and by whatever way the function gets at it, the next replay has the new one."""

import collections
import functools
import sys
import types

import pytest
import torch
from torch import nn

from npu_fuse import GraphRunner

here = sys.modules[__name__]
elsewhere = types.ModuleType("elsewhere")
weight = torch.ones(3)


class Model(nn.Module):
    table = torch.ones(3)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self._scaled(self.linear(x))

    def _scaled(self, x):
        return x * self.table * weight


def by_a_module(x):
    return x * elsewhere.weight


def by_code_inside(x):
    return sum((lambda y: y * weight)(x) for _ in range(1))


class Callable:
    def __call__(self, x):
        return x * weight


class Scales:
    weight = torch.ones(3)

    @property
    def doubled(self):
        return weight * 2

    @staticmethod
    def scaled(x):
        return x * weight


def by_a_class(x):
    return x * Scales.weight


def by_a_property(x):
    return x * Scales().doubled


def by_a_static_method(x):
    return Scales.scaled(x)


@functools.lru_cache
def doubled():
    return weight * 1


def by_what_a_cache_was_made_of(x):
    return weight * x + 0 * doubled()


def in_slots():
    class Slots:
        __slots__ = ("weight",)

    slots = Slots()
    slots.weight = torch.ones(3)
    return (lambda x: x * slots.weight), slots, "weight"


def in_a_deque():
    weights = collections.deque([torch.ones(3)])
    return (lambda x: x * weights[0]), weights, 0


def in_a_user_dict():
    weights = collections.UserDict(a=torch.ones(3))
    return (lambda x: x * weights["a"]), weights, "a"


def of_a_runner_inside():
    model = Model()
    inner = GraphRunner(model)
    return (lambda x: inner(x) * 2), model.linear, "weight"


PLACES = {
    "method": lambda: (Model(), here, "weight"),
    "class attribute": lambda: (Model(), Model, "table"),
    "module": lambda: (by_a_module, elsewhere, "weight"),
    "code inside": lambda: (by_code_inside, here, "weight"),
    "callable": lambda: (Callable(), here, "weight"),
    "class": lambda: (by_a_class, Scales, "weight"),
    "property": lambda: (by_a_property, here, "weight"),
    "static method": lambda: (by_a_static_method, here, "weight"),
    "lru_cache": lambda: (by_what_a_cache_was_made_of, here, "weight"),
    "slots": in_slots,
    "deque": in_a_deque,
    "UserDict": in_a_user_dict,
    "runner": of_a_runner_inside,
}


@torch.no_grad()
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_a_weight_is_replaced(place, monkeypatch):
    for holder in (here, elsewhere, Model, Scales):
        monkeypatch.setattr(holder, "table" if holder is Model else "weight", torch.rand(3), raising=False)
    function, holder, name = place()
    runner, x = GraphRunner(function), torch.randn(2, 3)
    for _ in range(3):
        for _ in range(2):
            torch.testing.assert_close(runner(x), function(x))
        if isinstance(holder, (collections.deque, collections.UserDict)):
            holder[name] = torch.rand(3)
        elif isinstance(holder, nn.Module):
            setattr(holder, name, nn.Parameter(torch.rand(3, 3)))
        else:
            setattr(holder, name, torch.rand(3))
    assert runner.stats.recaptures == 2


class Counted(nn.Module):
    """Its user counts, beside its weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.memo = {}

    def forward(self, x):
        return self.linear(x) * self.scale


@torch.no_grad()
def test_what_is_written_beside_weights_is_no_reason_to_capture():
    model = Counted()
    runner, x = GraphRunner(lambda x: model(x)), torch.randn(2, 3)
    for i in range(5):
        model.calls += 1
        model.seen = model.seen + 1  # another tensor, which no graph reads
        model.memo[i] = i
        model.linear.weight = model.linear.weight
        assert torch.equal(runner(x), model(x))
    assert (runner.stats.captures, runner.stats.recaptures) == (1, 0)
    model.scale = torch.rand(3)
    assert torch.equal(runner(x), model(x))
    assert runner.stats.recaptures == 1


@torch.no_grad()
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: m.forward, lambda m: lambda x: m(x)],
                         ids=["module", "method", "closure"])  # fmt: skip
def test_train_and_eval(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    runner, x = GraphRunner(wrap(model)), torch.randn(4, 3)
    runner(x)
    model.train()
    reference = nn.BatchNorm1d(3)
    torch.testing.assert_close(runner(x), reference(model[0](x)))
    torch.testing.assert_close(model[1].running_mean, reference.running_mean)
    model.eval()
    torch.testing.assert_close(runner(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("change", [
    lambda m: m.__setitem__(1, nn.Tanh()),
    lambda m: m.append(nn.Tanh()),
    lambda m: m.__delitem__(1),
], ids=["replaced", "added", "removed"])  # fmt: skip
def test_modules_without_weights(change):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    runner, x = GraphRunner(model), torch.randn(4, 3)
    runner(x)
    change(model)
    assert torch.equal(runner(x), model(x))


@torch.no_grad()
def test_a_cache_that_is_added_to_a_list():
    caches = [torch.ones(3)]

    def function(x):
        return sum(caches, x)

    runner = GraphRunner(function)
    for i in range(3):
        assert torch.equal(runner(torch.ones(3)), torch.full((3,), i + 2.0))
        caches.append(torch.ones(3))


@torch.no_grad()
def test_a_lazy_copy_that_becomes_real():
    model = nn.Linear(3, 3, bias=False)
    model.weight.data = torch._lazy_clone(model.weight.data)
    runner, x = GraphRunner(model), torch.randn(2, 3)
    for _ in range(3):
        assert torch.equal(runner(x), model(x))
        model.weight.mul_(2)
    assert runner.stats.captures <= 2
