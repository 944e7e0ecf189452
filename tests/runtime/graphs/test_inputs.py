"""How arguments get into static memory: padding, dtypes, layouts, lists on the host."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch

from npu_fuse import CaptureError, GraphRunner, InputSpec
from npu_fuse.runtime.ops.fused_infer_attention_score import NPU_FUSED_INFER_ATTENTION_SCORE
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target


def echo(**settings):
    """A runner that gives back what the function got, pads included, as the size of the output is always the same."""

    def function(x):
        y = torch.zeros(24, dtype=x.dtype)
        y[: x.numel()] = x.flatten()
        return y

    return GraphRunner(function, check_padding=False, **settings)


@pytest.mark.parametrize(("pad", "expected"), [(0, 0), (-1, -1), (7, 7), ("edge", None)])
def test_padding_is_fresh_on_every_replay(pad, expected):
    runner = echo(buckets=[6], inputs={"x": InputSpec("rows", pad=pad)})
    for n in (6, 2, 5, 1, 3):
        x = torch.randint(10, 99, (n, 4))
        got = runner(x).view(6, 4)
        assert torch.equal(got[:n], x)
        assert (got[n:] == (x[-1] if expected is None else expected)).all()


def test_several_axes_and_ones_with_an_offset():
    def function(positions, starts, count):
        return positions.sum(0, keepdim=True), starts.diff(), positions * count

    runner = GraphRunner(
        function,
        buckets={"tokens": [4, 8], "batch": [2, 4]},
        inputs={
            "positions": InputSpec((None, "tokens")),
            "starts": InputSpec("batch+1", pad="edge"),
            "count": InputSpec("batch"),
        },
        check_padding=False,
    )
    for tokens, batch in ((3, 1), (8, 4), (5, 2), (7, 1)):
        positions = torch.randint(0, 9, (3, tokens))
        starts = torch.randint(1, 5, (batch + 1,)).cumsum(0)
        sums, lengths, scaled = runner(positions, starts, batch)
        assert torch.equal(sums, positions.sum(0, keepdim=True))
        assert torch.equal(lengths, starts.diff())
        assert torch.equal(scaled, positions * {1: 2, 2: 2, 4: 4}[batch])  # an int is the size of the bucket
    assert runner.stats.captures == 3


def test_axes_have_to_agree():
    runner = GraphRunner(lambda x, y: x + y, buckets=[4], inputs={"x": InputSpec("n"), "y": InputSpec("n")})
    with pytest.raises(ValueError, match="axis 'n' is 3 by 'x' and 2 by 'y'"):
        runner(torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match=r"'x' has the shape \[\], but axes \('n',\)"):
        runner(torch.ones(()), torch.ones(2))


def test_other_dtypes_are_converted_or_refused_or_captured_apart():
    x = torch.arange(4)
    converted = GraphRunner(lambda x: x * 2, inputs={"x": InputSpec(dtype=torch.float32)})
    assert torch.equal(converted(x), x.float() * 2)
    assert torch.equal(converted(x.double()), x.float() * 2)
    assert converted.stats.captures == 1
    strict = GraphRunner(lambda x: x * 2, inputs={"x": InputSpec(dtype=torch.float32, convert=False)})
    with pytest.raises(ValueError, match=r"'x' is torch.int64, and its InputSpec wants torch.float32"):
        strict(x)
    apart = GraphRunner(lambda x: x * 2)
    assert apart(x).dtype == torch.int64
    assert apart(x.float()).dtype == torch.float32
    assert apart.stats.captures == 2


def test_layouts_are_those_of_contiguous_memory():
    seen = []
    runner = GraphRunner(lambda x: (seen.append(x.is_contiguous()), x @ x)[1])
    base = torch.randn(8, 8)
    for x in (base, base.t(), base.flip(0), base[:1].expand(8, 8)):
        torch.testing.assert_close(runner(x), x @ x)
    assert runner.stats.captures == 1
    assert all(seen)


def test_values_that_are_no_tensors_are_part_of_the_key():
    runner = GraphRunner(lambda x, factor=1, flag=None, sizes=(): x * factor + len(sizes))
    x = torch.randn(3)
    for arguments in ({}, {"factor": 2}, {"factor": 2.0}, {"factor": True}, {"flag": "a"}, {"sizes": [1, 2]}):
        expected = x * arguments.get("factor", 1) + len(arguments.get("sizes", ()))
        assert torch.equal(runner(x, **arguments), expected)
    assert runner.stats.captures == 6
    runner(x, flag=None)  # as if left out
    assert runner.stats.captures == 6


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ((torch.ones(2), torch.ones(2)), "is a tuple of tensors: pass each by its own name"),
        (torch.ones(2).to_sparse(), "has the layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_copied_is_refused(argument, reason):
    with pytest.raises(ValueError, match=reason):
        GraphRunner(lambda x: x)(argument)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"axes": "batch-1"}, "'batch-1' is no name of an axis"),
        ({"axes": None}, "None doesn't name dims as 'batch' or .* does; leave it out where no dim is padded"),
        ({"axes": ("n", 1)}, r"\('n', 1\) doesn't name dims"),
        ({"axes": "n", "pad": "zero"}, "'zero' is no number, nor 'edge'"),
        ({"axes": "n", "static": True}, "can't be padded or converted"),
        ({"axes": ("n", "m"), "host": "lengths"}, "a list has one axis, not 2"),
        ({"axes": "n", "host": "lengths", "pad": "edge"}, "a list on the host is padded with a number"),
    ],
)
def test_specs_that_contradict_themselves(settings, reason):
    with pytest.raises(ValueError, match=reason):
        GraphRunner(lambda x: x, inputs={"x": InputSpec(**settings)})


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"x": "n"}, "GraphRunner.inputs: 'x' is to be an InputSpec, not 'n'"),
        (["x"], r"GraphRunner.inputs: give a dict of an InputSpec for each name, not \['x'\]"),
        ({"y": InputSpec("n")}, "GraphRunner.inputs: 'y' is no parameter; known: x"),
    ],
)
def test_inputs_are_specs_by_name(inputs, reason):
    with pytest.raises(ValueError, match=reason):
        GraphRunner(lambda x: x, inputs=inputs)


# Lists on the host

WIDTH = 128


def attend(query, keys, lengths):
    """One token each over a cache, of which `lengths` says how far it is filled."""
    attention = torch.ops.npu.npu_fused_infer_attention_score
    return attention(
        query, keys, keys, actual_seq_lengths_kv=lengths, num_heads=1, num_key_value_heads=1, input_layout="BNSD",
        scale=0.1,
    )[0]  # fmt: skip


SPECS = {
    "query": InputSpec("batch"),
    "keys": InputSpec("batch"),
    "lengths": InputSpec("batch", host="actual_seq_lengths_kv"),
}


def batch(count):
    query, keys = torch.randn(count, 1, 1, WIDTH).half(), torch.randn(count, 1, 16, WIDTH).half()
    return query, keys, torch.randint(1, 17, (count,)).tolist()


def test_lists_on_the_host_are_padded_and_renewed():
    register(Target())
    assert NPU_FUSED_INFER_ATTENTION_SCORE.name == "npu::npu_fused_infer_attention_score"
    runner = GraphRunner(attend, buckets=[2, 4], inputs=SPECS, debug_poison=False)
    for count in (2, 4, 3, 1, 4, 2):
        call = batch(count)
        assert torch.equal(runner(*call), attend(*call))
    assert runner.stats.captures == 2


def test_a_key_that_no_op_knows_is_an_error():
    register(Target())
    specs = {**SPECS, "lengths": InputSpec("batch", host="actual_seq_kvlen")}  # that of the other version
    with pytest.raises(CaptureError, match=r"no op .* takes a list 'actual_seq_kvlen'.*actual_seq_lengths_kv"):
        GraphRunner(attend, buckets=[2], inputs=specs)(*batch(2))


def test_a_list_that_is_changed_before_the_op_is_an_error():
    register(Target())

    def longer(query, keys, lengths):
        return attend(query, keys, [min(16, length + 1) for length in lengths])

    query, keys, _ = batch(2)
    with pytest.raises(CaptureError, match=r"an op takes \[4, 8\] as .* but the input is \[3, 7\]"):
        GraphRunner(longer, buckets=[2], inputs=SPECS)(query, keys, [3, 7])


def test_a_list_with_axes_says_who_takes_it():
    with pytest.raises(ValueError, match=r"InputSpec.host says which argument of an op takes it"):
        GraphRunner(lambda x: torch.ones(len(x)), buckets=[2], inputs={"x": InputSpec("n")})([1, 2])


@pytest.mark.parametrize(
    ("one", "other"),
    [([2], [2.0]), (0.0, -0.0), ({"by": 2}, {"by": 3}), (slice(0, 2), slice(0, 3)), (np.float32(2), np.float32(3)),
     (np.array([2.0]), np.array([3.0]))],
    ids=repr,
)  # fmt: skip
def test_values_are_known_by_their_value_and_type(one, other):
    def function(x, value):
        if isinstance(value, slice):
            return x[value]
        value = value["by"] if isinstance(value, dict) else value[0] if isinstance(value, (list, np.ndarray)) else value
        return x * (float(value) if isinstance(value, np.float32) else value)

    runner, x = GraphRunner(function), torch.arange(1, 4)
    for value in (one, other, copy.deepcopy(one), other):
        torch.testing.assert_close(runner(x, value), function(x, value), rtol=0, atol=0)
        assert torch.equal(torch.signbit(runner(x, value)), torch.signbit(function(x, value)))
    assert runner.stats.captures == 2


def test_a_number_that_is_none_equals_itself():
    runner = GraphRunner(lambda x, value: x * value)
    for _ in range(3):
        assert runner(torch.ones(2), float("nan")).isnan().all()
    assert runner.stats.captures == 1


def test_an_array_that_changed_is_another_value():
    runner, value = GraphRunner(lambda x, value: x * value.item()), np.ones(1)
    runner(torch.ones(2), value)
    value[0] = 5
    assert torch.equal(runner(torch.ones(2), value), torch.full((2,), 5.0))


class Factor:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("wrap", [lambda factor: factor, lambda factor: (factor,)], ids=["itself", "in a tuple"])
def test_objects_are_known_by_their_identity_and_kept_as_long_as_their_graph(wrap):
    def function(x, factor):
        return x * (factor[0] if isinstance(factor, tuple) else factor).value

    runner, left = GraphRunner(function, max_graphs=2), []
    for i in range(8):
        factor = Factor(i)
        left.append(weakref.ref(factor))
        assert torch.equal(runner(torch.ones(2), wrap(factor)), torch.full((2,), float(i)))
    del factor
    gc.collect()
    assert sum(factor() is not None for factor in left) == 2


def test_arguments_go_where_the_function_has_them():
    def function(first, second=None, *rest):
        return (first if second is None else second) + sum(i * x for i, x in enumerate(rest, 2))

    runner, xs = GraphRunner(function), [torch.randn(3) for _ in range(4)]
    for arguments in ((xs[0],), (xs[0], None), xs[:2], xs, (xs[0], None, xs[1]), (xs[0], None, xs[2], xs[3])):
        assert torch.equal(runner(*arguments), function(*arguments))
    runner = GraphRunner(lambda x, **named: x + named["self"])
    assert torch.equal(runner(xs[0], self=1), xs[0] + 1)

    def by_position(x, /):
        return x

    with pytest.raises(TypeError, match="'x' is given but no parameter"):
        GraphRunner(by_position)(x=xs[0])


def test_orders_that_are_kept_have_graphs_of_their_own():
    strides = []
    spec = InputSpec("rows", keep_order=True)
    runner = GraphRunner(lambda x: (strides.append(x.stride()), x * 2)[1], buckets=[4], inputs={"x": spec})
    for n in (3, 4, 2):
        for x in (torch.randn(n, 5), torch.randn(5, n).t(), torch.randn(n, 10)[:, ::2]):
            assert torch.equal(runner(x), x * 2)
    assert runner.stats.captures == 2
    assert {(5, 1), (1, 4)} <= set(strides) <= {(5, 1), (1, 4), (1, 3), (1, 2)}


def test_a_declared_input_that_is_given_as_none_or_a_number():
    def function(x, y):
        return x * 1 if y is None else x * y

    specs = {"x": InputSpec("n"), "y": InputSpec("m")}
    runner, x = GraphRunner(function, buckets={"n": [4], "m": [2]}, inputs=specs), torch.randn(3, 2)
    for y in (None, 2.5, torch.tensor([2.0, 3.0]), None):
        assert torch.equal(runner(x, y), function(x, y))
