"""causal_conv1d against a simulation token by token in float64, over whole pools, and the limits of the kernel."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.causal_conv1d import CAUSAL_CONV1D, NPU_CAUSAL_CONV1D, PREFILL, UPDATE
from npu_fuse.runtime.target import Target

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
BOTH = [CAUSAL_CONV1D, NPU_CAUSAL_CONV1D]
PAD = -1


def values(*shape, dtype=HALF, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Simulated:
    """What each row of the output and of the pool must be: plain lists of float64 numbers, per channel."""

    outputs: dict[int, list[float]]
    pool: list[list[list[float]]]


def simulate(call, starts, slots) -> Simulated:
    """One token after the other, with a list of past tokens per sequence; nothing of the op is used but its terms."""
    weight = call["weight"].double().tolist()
    bias = [0.0] * len(weight[0]) if call["bias"] is None else call["bias"].double().tolist()
    tokens = call["x"].reshape(-1, call["x"].shape[-1]).double().tolist()
    pool = call["conv_states"].double().tolist()
    past = len(weight) - 1
    outputs = {}
    for index, slot in enumerate(slots):
        start, stop = starts[index], starts[index + 1]
        if start == stop or slot == call["pad_slot_id"]:
            continue
        old = [list(row) for row in pool[slot]]
        skip = 0
        if call["num_accepted_tokens"] is not None:
            skip = min(max(int(call["num_accepted_tokens"][index]) - 1, 0), len(old) - past)
        seen = old[skip : skip + past]
        if call["run_mode"] == PREFILL and not (
            call["has_initial_state"] is not None and call["has_initial_state"][index]
        ):
            seen = [[0.0] * len(bias)] * past
        for token in range(start, stop):
            seen = [*seen, tokens[token]]
            row = []
            for channel, offset in enumerate(bias):
                total = offset + sum(weight[-1 - age][channel] * seen[-1 - age][channel] for age in range(past + 1))
                row.append(total / (1 + math.exp(-total)) if call["activation_mode"] else total)
            outputs[token] = row
        if call["num_accepted_tokens"] is not None and 2 + stop - start <= len(old):
            pool[slot] = [*old[skip + 1 : skip + 3], *tokens[start:stop], *old[2 + stop - start :]]
        else:
            pool[slot] = [*seen[-past:], *old[past:]]
    return Simulated(outputs, pool)


@st.composite
def calls(draw):
    """Arguments of a legal call, the start of each sequence and its slot."""
    width = draw(st.integers(2, 4))
    run_mode = draw(st.sampled_from([PREFILL, UPDATE]))
    dim = draw(st.sampled_from([16, 48]))
    dtype = draw(st.sampled_from([HALF, BRAIN]))
    packed = draw(st.booleans())
    if packed:
        lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 9]), min_size=1, max_size=5).filter(any))
        first, tail = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    else:
        lengths = [draw(st.sampled_from([1, 2, 3, 7]))] * draw(st.integers(1, 4))
        first, tail = 0, 0
    starts = [first]
    for length in lengths:
        starts.append(starts[-1] + length)
    batch = len(lengths)
    slots_in_pool = batch + draw(st.integers(0, 2))
    state_len = width - 1 + draw(st.integers(0, 4))
    index = draw(st.sampled_from([torch.int32, torch.int64]))
    cache_indices, slots = None, list(range(batch))
    if draw(st.booleans()):
        order = draw(st.permutations(range(slots_in_pool)))
        pads = draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
        slots = [PAD if is_pad else slot for slot, is_pad in zip(order, pads, strict=False)]
        cache_indices = torch.tensor(slots, dtype=index)
    initial = accepted = None
    if run_mode == PREFILL and draw(st.booleans()):
        flags = draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
        initial = torch.tensor(flags, dtype=draw(st.sampled_from([torch.bool, torch.int32])))
    if run_mode == UPDATE and width == 4 and draw(st.booleans()):
        accepted = torch.tensor(draw(st.lists(st.integers(0, 6), min_size=batch, max_size=batch)), dtype=index)
    seed = draw(st.integers(0, 1000))
    shape = (starts[-1] + tail, dim) if packed else (batch, lengths[0], dim)
    arguments = {
        "x": values(*shape, dtype=dtype, seed=seed),
        "weight": values(width, dim, dtype=dtype, seed=seed + 1),
        "conv_states": values(slots_in_pool, state_len, dim, dtype=dtype, seed=seed + 2),
        "bias": values(dim, dtype=dtype, seed=seed + 3) if draw(st.booleans()) else None,
        "query_start_loc": torch.tensor(starts, dtype=index) if packed else None,
        "cache_indices": cache_indices,
        "has_initial_state": initial,
        "num_accepted_tokens": accepted,
        "activation_mode": draw(st.integers(0, 1)),
        "pad_slot_id": PAD,
        "run_mode": run_mode,
    }
    return arguments, starts, slots


def assert_as_simulated(contract, call, starts, slots, skipped):
    expected = simulate(call, starts, slots)
    call = call | {"conv_states": call["conv_states"].clone()}
    dtype = call["x"].dtype
    rows = contract.op(**call).reshape(-1, call["x"].shape[-1])
    for token, row in enumerate(rows):
        if token in expected.outputs:
            wanted = torch.tensor(expected.outputs[token], dtype=torch.float64)
            # One rounding of the result, and float32 sums.
            step = torch.finfo(dtype).eps / 2
            torch.testing.assert_close(row.double(), wanted, rtol=step * 1.01, atol=3e-6)
        else:
            assert skipped(row)
    assert torch.equal(call["conv_states"], torch.tensor(expected.pool, dtype=torch.float64).to(dtype))


@settings(max_examples=300, deadline=None)
@given(calls())
def test_outputs_and_the_whole_pool_are_as_simulated(drawn):
    call, starts, slots = drawn
    assert CAUSAL_CONV1D.refusal(Target(), **call) is None
    assert_as_simulated(CAUSAL_CONV1D, call, starts, slots, skipped=lambda row: bool((row == 0).all()))


@settings(max_examples=60, deadline=None)
@given(calls())
def test_the_op_of_the_package_differs_in_rows_that_it_skips(drawn):
    call, starts, slots = drawn
    assert_as_simulated(NPU_CAUSAL_CONV1D, call, starts, slots, skipped=lambda row: bool(row.isnan().all()))


@settings(max_examples=100, deadline=None)
@given(calls())
def test_on_the_device_the_rows_that_the_kernel_skips_are_set_to_zero(drawn):
    call, _, _ = drawn
    wanted_states, states = call["conv_states"].clone(), call["conv_states"].clone()
    wanted = CAUSAL_CONV1D.op(**call | {"conv_states": wanted_states})
    assert torch.equal(CAUSAL_CONV1D.device_kernel(**call | {"conv_states": states}), wanted)
    assert torch.equal(states, wanted_states)


def sequence_of(*lengths):
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return torch.tensor(starts)


@pytest.mark.parametrize("pieces", [[7], [1] * 7, [2, 5], [5, 2], [1, 1, 5], [3, 4]])
def test_a_sequence_in_pieces_is_the_sequence(pieces):
    weight, bias, x = values(4, 16, seed=1), values(16, seed=2), values(7, 16)
    dirty = values(1, 5, 16, seed=3)
    whole = dirty.clone()
    expected = CAUSAL_CONV1D.op(x, weight, whole, bias, sequence_of(7), activation_mode=1)
    states, outputs = dirty.clone(), []
    for index, piece in enumerate(x.split(pieces)):
        mode = {"run_mode": UPDATE} if index else {}
        outputs.append(
            CAUSAL_CONV1D.op(piece, weight, states, bias, sequence_of(len(piece)), activation_mode=1, **mode)
        )
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(states, whole)


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_rejected_tokens_leave_no_trace(accepted):
    """Four drafts are verified, some are accepted, and four more follow: as if only accepted ones had ever been."""
    weight, prompt, drafts, more = (values(rows, 16, seed=seed) for seed, rows in enumerate((4, 5, 4, 4)))
    states = values(1, 6, 16, seed=9)
    CAUSAL_CONV1D.op(prompt, weight, states, query_start_loc=sequence_of(5))
    for tokens, count in ((drafts, 1), (more, accepted)):
        found = CAUSAL_CONV1D.op(
            tokens,
            weight,
            states,
            query_start_loc=sequence_of(4),
            num_accepted_tokens=torch.tensor([count]),
            run_mode=UPDATE,
        )
    kept = torch.cat((prompt, drafts[:accepted], more))
    expected = CAUSAL_CONV1D.op(kept, weight, torch.zeros(1, 3, 16).half(), query_start_loc=sequence_of(len(kept)))
    assert torch.equal(found, expected[-4:])


def test_a_transposed_view_of_a_cache_is_written_through():
    memory = values(2, 3, 16)
    cache = memory.transpose(1, 2)
    assert cache.shape == (2, 16, 3)
    x = values(2, 1, 16, seed=1)
    before = cache.clone()
    CAUSAL_CONV1D.op(x, values(4, 16, seed=2), cache.transpose(1, 2), run_mode=UPDATE)
    assert torch.equal(cache, torch.cat((before[..., 1:], x.transpose(1, 2)), -1))


@pytest.mark.parametrize("packed", [True, False])
def test_opcheck(packed):
    call = legal(packed=packed, bias=values(16, seed=3), cache_indices=torch.tensor([2, PAD]))
    torch.library.opcheck(CAUSAL_CONV1D.op, (), call, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("contract", BOTH)
@pytest.mark.parametrize("packed", [True, False])
def test_the_fake_kernel_has_the_layout_of_the_result(assert_same_layout, contract, packed):
    assert_same_layout(contract.op, *contract.bind(**legal(packed=packed)).values())


def test_a_graph_keeps_the_write_and_its_order():
    def step(states, x, weight):
        before = states[0].clone()
        torch.ops.npu_fuse.causal_conv1d(x, weight, states, run_mode=UPDATE)
        return before, states[0].clone()

    states, x, weight = values(1, 3, 16), values(1, 1, 16, seed=1), values(4, 16, seed=2)
    old = states.clone()
    before, after = torch.compile(step, backend="aot_eager", fullgraph=True)(states, x, weight)
    assert torch.equal(before, old[0])
    assert torch.equal(after, torch.cat((old[0, 1:], x[0])))
    assert torch.equal(after, states[0])


def legal(packed=True, dtype=HALF, width=4, dim=16, state_len=3, slots=3, **changes):
    """A legal call of two sequences, changed."""
    shape = (5, dim) if packed else (2, 3, dim)
    arguments = {
        "x": values(*shape, dtype=dtype),
        "weight": values(width, dim, dtype=dtype, seed=1),
        "conv_states": values(slots, state_len, dim, dtype=dtype, seed=2),
        "query_start_loc": torch.tensor([0, 2, 5]) if packed else None,
        "run_mode": UPDATE,
    }
    return arguments | changes


BORDERS = [
    (legal(dtype=FLOAT), "x is float32 (the kernel takes float16, bfloat16)", legal(dtype=BRAIN)),
    (legal(x=values(16)), "x has 1 dims [16] (the kernel takes 2 to 3)", legal()),
    (legal(x=values(1, 2, 3, 16)), "x has 4 dims", legal(packed=False)),
    (legal(weight=values(16, 1, 4)), "weight has 3 dims", legal()),
    (legal(conv_states=values(3, 48)), "conv_states has 2 dims", legal()),
    (legal(weight=values(4, 16, dtype=BRAIN)), "weight is bfloat16 but x is float16 (they must be equal)", legal()),
    (legal(conv_states=values(3, 3, 16, dtype=FLOAT)), "conv_states is float32 but x is float16", legal()),
    (legal(bias=values(16, dtype=FLOAT)), "bias is float32 but x is float16", legal(bias=values(16))),
    (legal(x=values(0, 16)), "x [0, 16] is empty", legal(x=values(1, 16), query_start_loc=torch.tensor([0, 1, 1]))),
    (
        legal(slots=0, cache_indices=torch.tensor([PAD, PAD])),
        "conv_states [0, 3, 16] is empty",
        legal(slots=1, cache_indices=torch.tensor([PAD, PAD])),
    ),
    (legal(x=values(16, 5).mT), "x [5, 16] with strides [1, 5] is not contiguous", legal()),
    (legal(weight=values(16, 4).mT), "weight [4, 16] with strides [1, 4] is not contiguous", legal()),
    (legal(conv_states=values(3, 16, 3).mT), "conv_states [3, 3, 16] with strides [48, 1, 3] is not", legal()),
    (legal(conv_states=values(3, 4, 16)[:, 1:]), "conv_states [3, 3, 16] with strides [64, 16, 1] is not", legal()),
    (legal(bias=values(32)[::2]), "bias [16] with strides [2] is not contiguous", legal(bias=values(16))),
    (legal(width=1), "weight [1, 16] has width 1 (the kernel takes 2 to 4)", legal(width=2)),
    (legal(width=5, state_len=4), "weight [5, 16] has width 5 (the kernel takes 2 to 4)", legal(width=4)),
    (legal(weight=values(4, 32)), "weight [4, 32] is not known to have the 16 channels of x", legal()),
    (legal(conv_states=values(3, 3, 32)), "conv_states [3, 3, 32] is not known to have the 16 channels of x", legal()),
    (legal(dim=24), "x has 24 channels, not known to be a multiple of 16", legal(dim=32)),
    (legal(state_len=2), "conv_states [3, 2, 16] is not known to hold the 3 tokens", legal(state_len=3)),
    (legal(width=3, state_len=1), "is not known to hold the 2 tokens", legal(width=3, state_len=2)),
    (legal(bias=values(1)), "bias [1] is not [16]", legal(bias=values(16))),
    (legal(bias=values(1, 16)), "bias [1, 16] is not [16]", legal(bias=values(16))),
    (legal(activation_mode=2), "activation_mode is 2 (0 is none, 1 is SiLU)", legal(activation_mode=1)),
    (legal(activation_mode=-1), "activation_mode is -1", legal(activation_mode=0)),
    (legal(run_mode=2), "run_mode is 2 (0 is prefill, 1 is update)", legal(run_mode=PREFILL)),
    (legal(run_mode=-1), "run_mode is -1", legal(run_mode=UPDATE)),
    (
        legal(packed=False, query_start_loc=torch.tensor([0, 3, 6])),
        "query_start_loc is given, which the kernel ignores where x has 3 dims",
        legal(packed=False),
    ),
    (legal(query_start_loc=None), "query_start_loc is missing, which an x of 2 dims needs", legal()),
    (legal(query_start_loc=torch.tensor([0.0, 2, 5])), "query_start_loc is float32", legal()),
    (
        legal(query_start_loc=torch.tensor([[0, 2, 5]])),
        "query_start_loc has 2 dims",
        legal(query_start_loc=torch.tensor([0, 2, 5], dtype=torch.int32)),
    ),
    (legal(query_start_loc=torch.tensor([0, 9, 2, 9, 5])[::2]), "query_start_loc [3] with strides [2]", legal()),
    (
        legal(query_start_loc=torch.tensor([0])),
        "query_start_loc [1] is not known to have 2 entries or more",
        legal(query_start_loc=torch.tensor([0, 5])),
    ),
    (
        legal(slots=1),
        "conv_states has 1 slots, not known to be enough for 2 sequences without cache_indices",
        legal(slots=2),
    ),
    (
        legal(packed=False, slots=1),
        "conv_states has 1 slots, not known to be enough for 2 sequences",
        legal(packed=False, slots=2),
    ),
    (
        legal(pad_slot_id=0),
        "pad_slot_id is 0 without cache_indices, and whether the kernel then skips the sequence of this number is not",
        legal(pad_slot_id=0, cache_indices=torch.tensor([0, 1])),
    ),
    (legal(pad_slot_id=2), "pad_slot_id is 2 without cache_indices", legal(pad_slot_id=-2)),
    (
        legal(cache_indices=torch.tensor([1])),
        "cache_indices [1] is not known to have one entry for each of 2 sequences",
        legal(cache_indices=torch.tensor([1, 0])),
    ),
    (
        legal(packed=False, cache_indices=torch.tensor([1, 0, 2])),
        "cache_indices [3] is not known to have one entry for each of 2 sequences",
        legal(packed=False, cache_indices=torch.tensor([1, 0])),
    ),
    (
        legal(cache_indices=torch.tensor([True, False])),
        "cache_indices is bool",
        legal(cache_indices=torch.tensor([1, 0], dtype=torch.int32)),
    ),
    (
        legal(cache_indices=torch.tensor([[1, 0]])),
        "cache_indices has 2 dims",
        legal(cache_indices=torch.tensor([1, 0])),
    ),
    (
        legal(cache_indices=torch.tensor([1, 9, 0, 9])[::2]),
        "cache_indices [2] with strides [2]",
        legal(cache_indices=torch.tensor([1, 0])),
    ),
    (
        legal(has_initial_state=torch.tensor([True, False])),
        "has_initial_state is given, which the kernel ignores in run_mode 1 (it always reads the state)",
        legal(has_initial_state=torch.tensor([True, False]), run_mode=PREFILL),
    ),
    (
        legal(has_initial_state=torch.tensor([1.0, 0.0]), run_mode=PREFILL),
        "has_initial_state is float32",
        legal(has_initial_state=torch.tensor([1, 0]), run_mode=PREFILL),
    ),
    (
        legal(has_initial_state=torch.tensor([True]), run_mode=PREFILL),
        "has_initial_state [1] is not known to have one entry for each of 2",
        legal(has_initial_state=torch.tensor([True, True]), run_mode=PREFILL),
    ),
    (
        legal(num_accepted_tokens=torch.tensor([1, 1]), run_mode=PREFILL),
        "num_accepted_tokens is given, which the kernel ignores in run_mode 0",
        legal(num_accepted_tokens=torch.tensor([1, 1])),
    ),
    (
        legal(num_accepted_tokens=torch.tensor([1, 1]), width=3),
        "num_accepted_tokens is given, which the kernel ignores for width 3 (it reads it for 4 alone)",
        legal(num_accepted_tokens=torch.tensor([1, 1]), width=4),
    ),
    (
        legal(num_accepted_tokens=torch.tensor([1])),
        "num_accepted_tokens [1] is not known to have one entry for each of 2",
        legal(num_accepted_tokens=torch.tensor([1, 2])),
    ),
    (
        legal(num_accepted_tokens=torch.tensor([True, True])),
        "num_accepted_tokens is bool",
        legal(num_accepted_tokens=torch.tensor([1, 2], dtype=torch.int32)),
    ),
]


@pytest.mark.parametrize("contract", BOTH)
@pytest.mark.parametrize(("outside", "reason", "inside"), BORDERS)
def test_borders(contract, outside, reason, inside, assert_border):
    assert_border(contract, outside, reason, inside)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (
            legal(cache_indices=torch.tensor([1, 3])),
            r"cache_indices names slots \[3\] of conv_states with 3",
            legal(cache_indices=torch.tensor([1, 2])),
        ),
        (
            legal(cache_indices=torch.tensor([-2, 0])),
            r"cache_indices names slots \[-2\]",
            legal(cache_indices=torch.tensor([PAD, 0])),
        ),
        (
            legal(cache_indices=torch.tensor([PAD, 0]), pad_slot_id=7),
            r"cache_indices names slots \[-1\]",
            legal(cache_indices=torch.tensor([7, 0]), pad_slot_id=7),
        ),
        (
            legal(cache_indices=torch.tensor([2, 2])),
            r"cache_indices names slots \[2\] more than once",
            legal(cache_indices=torch.tensor([PAD, PAD])),
        ),
        (
            legal(cache_indices=torch.tensor([2, 2]), query_start_loc=torch.tensor([0, 1, 5])),
            r"cache_indices names slots \[2\] more than once",
            legal(cache_indices=torch.tensor([2, 2]), query_start_loc=torch.tensor([0, 0, 5])),
        ),
        (
            legal(query_start_loc=torch.tensor([0, 3, 2])),
            r"query_start_loc is \[0, 3, 2\], which must rise",
            legal(query_start_loc=torch.tensor([0, 2, 2])),
        ),
        (
            legal(query_start_loc=torch.tensor([0, 3, 6])),
            r"at most 5 tokens",
            legal(query_start_loc=torch.tensor([0, 3, 5])),
        ),
        (
            legal(query_start_loc=torch.tensor([-1, 3, 5])),
            r"query_start_loc is \[-1, 3, 5\]",
            legal(query_start_loc=torch.tensor([1, 3, 5])),
        ),
    ],
)
def test_values_that_are_undefined_raise_and_nothing_is_written(outside, reason, inside):
    for contract in BOTH:
        states = outside["conv_states"].clone()
        with pytest.raises(ValueError, match=f"{contract.name}: .*{reason}"):
            contract.op(**outside | {"conv_states": states})
        assert torch.equal(states, outside["conv_states"])
        contract.op(**inside)


def test_symbolic_tokens_and_slots_are_not_refused(symbolic):
    packed = {
        "x": symbolic(("T", 64), HALF),
        "weight": symbolic((4, 64), HALF),
        "conv_states": symbolic(("S", 3, 64), HALF),
        "query_start_loc": symbolic((5,), torch.int32),
        "cache_indices": symbolic((4,), torch.int64),
    }
    assert CAUSAL_CONV1D.refusal(Target(), **packed) is None
    batched = packed | {
        "x": symbolic(("B", "S", 64), HALF),
        "conv_states": symbolic(("B", 4, 64), HALF),
        "query_start_loc": None,
        "cache_indices": None,
    }
    assert CAUSAL_CONV1D.refusal(Target(), **batched) is None
    with_slots = batched | {"conv_states": symbolic(("T", 4, 64), HALF), "cache_indices": symbolic(("B",), torch.int32)}
    assert CAUSAL_CONV1D.refusal(Target(), **with_slots) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight": ("S", 64)}, "of weight is not static"),
        ({"x": ("B", 2, "T")}, "is not known to have the"),
        ({"conv_states": ("B", "S", 64)}, "is not known to hold the 3 tokens"),
        ({"conv_states": ("S", 3, 64)}, "not known to be enough for"),
    ],
)
def test_symbolic_sizes_that_may_be_too_small_are_refused(symbolic, changes, reason):
    shapes = {"x": ("B", 2, 64), "weight": (4, 64), "conv_states": ("B", 3, 64)} | changes
    call = {name: symbolic(shape, HALF) for name, shape in shapes.items()}
    assert reason in CAUSAL_CONV1D.refusal(Target(), **call)


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (CAUSAL_CONV1D.refusal(Target(soc), **legal()) is None) == (soc in ("ascend910b", "ascend910_93"))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "sgl_kernel_npu, which has the kernel, can't be imported"),
        ("2026.6.0", "has no causal_conv1d with a run_mode, 2026.7.1 brought it"),
        ("2026.7.1", None),
    ],
)
def test_package_versions(version, reason):
    packages = {"sgl_kernel_npu": version} if version else {}
    found = CAUSAL_CONV1D.refusal(Target("ascend910b", "npu", packages), **legal())
    assert (found is None) if reason is None else (reason in found)
    assert CAUSAL_CONV1D.refusal(Target("ascend910b", "cpu", packages), **legal()) is None
