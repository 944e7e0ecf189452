"""Both gated delta rules against the recurrence in float64, what they leave alone, and their limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.chunk_gated_delta_rule import NPU_CHUNK_GATED_DELTA_RULE
from npu_fuse.runtime.ops.recurrent_gated_delta_rule import NPU_RECURRENT_GATED_DELTA_RULE
from npu_fuse.runtime.target import Target

RECURRENT, CHUNK = NPU_RECURRENT_GATED_DELTA_RULE, NPU_CHUNK_GATED_DELTA_RULE
BRAIN, FLOAT, INT = torch.bfloat16, torch.float32, torch.int32


def values(*shape, dtype=BRAIN, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads_of(tokens, shared, heads, key_dim, value_dim, seed=0):
    """query, key (normed, as callers do), value, beta and g of a call."""
    query, key = (
        torch.nn.functional.normalize(values(tokens, shared, key_dim, dtype=FLOAT, seed=seed + i), dim=-1).to(BRAIN)
        for i in range(2)
    )
    return {
        "query": query,
        "key": key,
        "value": values(tokens, heads, value_dim, seed=seed + 2),
        "beta": values(tokens, heads, seed=seed + 3).sigmoid(),
        "g": -values(tokens, heads, dtype=FLOAT, seed=seed + 4).sigmoid(),
    }


def recurrence(call, start, stop, state):
    """Outputs and states of tokens start to stop: S = a S (I - b k k^T) + b v k^T, head by head in float64."""
    outputs, states = [], []
    heads, shared = call["value"].shape[1], call["key"].shape[1]
    state = state.double()
    for token in range(start, stop):
        output, after = [], []
        for head in range(heads):
            q, k = (call[name][token, head // (heads // shared)].double() for name in ("query", "key"))
            v, b = call["value"][token, head].double(), call["beta"][token, head].double()
            decay = 1.0 if call["g"] is None else call["g"][token, head].double().exp()
            erased = torch.eye(len(k), dtype=torch.float64) - b * torch.outer(k, k)
            s = decay * state[head] @ erased + b * torch.outer(v, k)
            output.append(call["scale"] * s @ q)
            after.append(s)
        state = torch.stack(after)
        outputs.append(torch.stack(output))
        states.append(state)
    return outputs, states


def assert_rounded(actual, wanted):
    """The number nearest to what is wanted, or its neighbour where float32 sums went astray."""
    torch.testing.assert_close(actual.double(), wanted, rtol=torch.finfo(BRAIN).eps / 2 * 1.02, atol=1e-5)


@st.composite
def calls(draw):
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    shared = draw(st.sampled_from([1, 2]))
    heads = shared * draw(st.sampled_from([1, 3]))
    key_dim, value_dim = draw(st.sampled_from([(8, 8), (16, 5), (3, 16)]))
    tokens = sum(lengths)
    blocks = tokens + draw(st.integers(0, 3))
    call = heads_of(tokens, shared, heads, key_dim, value_dim, seed=draw(st.integers(0, 1000)))
    order = draw(st.permutations(range(blocks)))
    if draw(st.booleans()):  # one block for all tokens of a sequence, as without speculation
        order = [order[i] for i, length in enumerate(lengths) for _ in range(length)]
    if draw(st.booleans()):
        call["g"] = None
    accepted = None
    if draw(st.booleans()):
        accepted = torch.tensor([draw(st.integers(1, length)) for length in lengths], dtype=INT)
    return call | {
        "state": values(blocks, heads, value_dim, key_dim, seed=7),
        "scale": draw(st.sampled_from([1.0, 0.25])),
        "actual_seq_lengths": torch.tensor(lengths, dtype=INT),
        "ssm_state_indices": torch.tensor(order[:tokens], dtype=INT),
        "num_accepted_tokens": accepted,
    }


@settings(max_examples=150, deadline=None)
@given(calls())
def test_recurrent_outputs_and_the_whole_pool_follow_the_recurrence(call):
    assert RECURRENT.refusal(Target(), **call) is None
    before = call["state"].clone()
    wanted = dict(enumerate(before.double()))
    actual = RECURRENT.op(**call)
    start = 0
    blocks = call["ssm_state_indices"].tolist()
    for index, length in enumerate(call["actual_seq_lengths"].tolist()):
        first = 0 if call["num_accepted_tokens"] is None else int(call["num_accepted_tokens"][index]) - 1
        outputs, states = recurrence(call, start, start + length, before[blocks[start + first]])
        for token, output, state in zip(range(start, start + length), outputs, states, strict=True):
            assert_rounded(actual[token], output)
            wanted[blocks[token]] = state
        start += length
    for block, state in wanted.items():
        if block in blocks:
            assert_rounded(call["state"][block], state)
        else:
            assert torch.equal(call["state"][block], before[block])


@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(1, 70), shared=st.sampled_from([1, 2]), group=st.sampled_from([1, 2]), gated=st.booleans())
def test_chunked_outputs_and_the_last_state_follow_the_recurrence(tokens, shared, group, gated):
    call = heads_of(tokens, shared, shared * group, 128, 128)
    initial = values(1, shared * group, 128, 128, seed=9)
    call |= {"initial_state": initial, "actual_seq_lengths": torch.tensor([tokens], dtype=INT), "scale": 128**-0.5}
    call["g"] = call["g"] if gated else None
    before = initial.clone()
    actual, state = CHUNK.op(**call)
    outputs, states = recurrence(call, 0, tokens, before[0])
    assert_rounded(actual, torch.stack(outputs))
    assert_rounded(state[0], states[-1])
    assert torch.equal(initial, before)


def test_without_a_scale_the_chunks_are_not_scaled():
    call = chunked()
    one, none = (CHUNK.op(**call | {"scale": scale}) for scale in (1.0, None))
    assert torch.equal(one[0], none[0])


def test_tokens_in_pieces_are_the_sequence():
    """Eight tokens at once, or three and then five: states are rounded in between, and outputs differ by no more."""
    call = recurrent(tokens=8, lengths=[8], indices=[0] * 8)
    whole = call["state"].clone()
    expected = RECURRENT.op(**call | {"state": whole})
    pieces, state = [], call["state"].clone()
    for part in (slice(0, 3), slice(3, 8)):
        length = part.stop - part.start
        piece = {name: call[name][part] for name in ("query", "key", "value", "beta", "g")}
        piece |= {"actual_seq_lengths": torch.tensor([length], dtype=INT)}
        piece |= {"ssm_state_indices": torch.zeros(length, dtype=INT)}
        pieces.append(RECURRENT.op(**call | piece | {"state": state}))
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(state, whole, rtol=0.02, atol=0.02)


def recurrent(tokens=3, lengths=(1, 2), indices=(4, 0, 2), shared=2, heads=4, key_dim=8, value_dim=8, **changes):
    """A legal call, changed."""
    arguments = heads_of(tokens, shared, heads, key_dim, value_dim) | {
        "state": values(max(tokens, 5), heads, value_dim, key_dim, seed=7),
        "scale": 0.25,
        "actual_seq_lengths": torch.tensor(lengths, dtype=INT),
        "ssm_state_indices": torch.tensor(indices, dtype=INT),
    }
    return arguments | changes


def chunked(tokens=3, shared=1, heads=2, dim=128, **changes):
    """A legal call, changed."""
    arguments = heads_of(tokens, shared, heads, dim, dim) | {
        "initial_state": values(1, heads, dim, dim, seed=7),
        "actual_seq_lengths": torch.tensor([tokens], dtype=INT),
        "scale": 0.25,
        "g": None,
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (recurrent(query=values(3, 2, 8).half()), "query is float16 (the kernel takes bfloat16)", recurrent()),
        (recurrent(key=values(3, 2, 8).float()), "key is float32 (the kernel takes bfloat16)", recurrent()),
        (recurrent(value=values(3, 32)), "value has 2 dims [3, 32] (the kernel takes 3)", recurrent()),
        (recurrent(value=values(0, 4, 8)), "value [0, 4, 8] is empty", recurrent()),
        (recurrent(query=values(3, 8, 2).mT), "query [3, 2, 8] with strides [16, 1, 2] is not contiguous", recurrent()),
        (
            recurrent(query=values(3, 1, 8)),
            "query [3, 1, 8] and key [3, 2, 8] are not known to have one shape",
            recurrent(query=values(3, 2, 8)),
        ),
        (
            recurrent(value=values(4, 4, 8)),
            "value [4, 4, 8] and key [3, 2, 8] are not known to have as many tokens",
            recurrent(),
        ),
        (
            recurrent(heads=3),
            "3 heads of value are not known to be a multiple of 2 heads of key",
            recurrent(heads=6),
        ),
        (
            recurrent(shared=1, heads=257, key_dim=1, value_dim=1),
            "value has 257 heads, not known to be at most 256",
            recurrent(shared=1, heads=256, key_dim=1, value_dim=1),
        ),
        (recurrent(key_dim=513), "key has head_dim 513, not known to be at most 512", recurrent(key_dim=512)),
        (recurrent(value_dim=513), "value has head_dim 513, not known to be at most 512", recurrent(value_dim=512)),
        (recurrent(state=values(5, 4, 8, 8).float()), "state is float32 (the kernel takes bfloat16)", recurrent()),
        (recurrent(state=values(5, 4, 64)), "state has 3 dims", recurrent()),
        (recurrent(state=values(5, 4, 8, 8).mT), "state [5, 4, 8, 8] with strides [256, 64, 1, 8]", recurrent()),
        (
            recurrent(value_dim=4, state=values(5, 4, 8, 4)),
            "state [5, 4, 8, 4] is not [blocks, 4, 4, 8]",
            recurrent(value_dim=4, state=values(5, 4, 4, 8)),
        ),
        (
            recurrent(state=values(2, 4, 8, 8), indices=(0, 1, 1)),
            "state has 2 blocks, not known to be enough for 3 tokens",
            recurrent(state=values(3, 4, 8, 8), indices=(0, 1, 1)),
        ),
        (recurrent(state=values(0, 4, 8, 8)), "state [0, 4, 8, 8] is empty", recurrent()),
        (recurrent(beta=None), "beta is missing, which the kernel needs", recurrent()),
        (recurrent(scale=None), "scale is missing, which the kernel needs", recurrent()),
        (recurrent(actual_seq_lengths=None), "actual_seq_lengths is missing", recurrent()),
        (recurrent(ssm_state_indices=None), "ssm_state_indices is missing", recurrent()),
        (recurrent(beta=values(3, 4).float()), "beta is float32 (the kernel takes bfloat16)", recurrent()),
        (recurrent(beta=values(3, 2)), "beta [3, 2] is not [3, 4]", recurrent()),
        (recurrent(beta=values(4, 3).T), "beta [3, 4] with strides [1, 3]", recurrent()),
        (
            recurrent(g=-values(3, 4).sigmoid()),
            "g is bfloat16 (the kernel takes float32)",
            recurrent(g=-values(3, 4, dtype=FLOAT).sigmoid()),
        ),
        (recurrent(g=values(3, dtype=FLOAT)), "g [3] is not [3, 4]", recurrent(g=None)),
        (
            recurrent(ssm_state_indices=torch.tensor([4, 0, 2])),
            "ssm_state_indices is int64 (the kernel takes int32)",
            recurrent(),
        ),
        (recurrent(indices=(4, 0)), "ssm_state_indices [2] is not known to have 3 entries", recurrent()),
        (recurrent(indices=[[4, 0, 2]]), "ssm_state_indices has 2 dims", recurrent()),
        (recurrent(actual_seq_lengths=torch.tensor([1, 2])), "actual_seq_lengths is int64", recurrent()),
        (
            recurrent(actual_seq_lengths=torch.tensor([1, 0, 2, 0], dtype=INT)[::2]),
            "actual_seq_lengths [2] with strides [2] is not contiguous",
            recurrent(),
        ),
        (
            recurrent(num_accepted_tokens=torch.tensor([1], dtype=INT)),
            "num_accepted_tokens [1] is not known to have 2 entries",
            recurrent(num_accepted_tokens=torch.tensor([1, 2], dtype=INT)),
        ),
        (
            recurrent(gk=values(3, 4, 8, dtype=FLOAT)),
            "gk is given (npu_fuse supports its default alone, None)",
            recurrent(gk=None),
        ),
    ],
)
def test_borders_of_the_recurrent_rule(outside, reason, inside, assert_border):
    assert_border(RECURRENT, outside, reason, inside)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (chunked(query=values(3, 1, 128).half()), "query is float16 (the kernel takes bfloat16)", chunked()),
        (
            chunked(shared=2, heads=3),
            "3 heads of value are not known to be a multiple of 2",
            chunked(shared=2, heads=4),
        ),
        (chunked(heads=65), "value has 65 heads, not known to be at most 64", chunked(heads=64)),
        (chunked(dim=64), "key has head_dim 64 (the kernel takes 128)", chunked(dim=128)),
        (chunked(value=values(3, 2, 64)), "value has head_dim 64 (the kernel takes 128)", chunked()),
        (chunked(beta=None), "beta is missing, which the kernel needs", chunked()),
        (chunked(initial_state=None), "initial_state is missing", chunked()),
        (chunked(actual_seq_lengths=None), "actual_seq_lengths is missing", chunked()),
        (chunked(beta=values(3, 2).float()), "beta is float32 (the kernel takes bfloat16)", chunked()),
        (chunked(g=-values(3, 2).sigmoid()), "g is bfloat16 (the kernel takes float32)", chunked()),
        (chunked(initial_state=values(1, 2, 128, 128).float()), "initial_state is float32", chunked()),
        (
            chunked(initial_state=values(1, 1, 128, 128)),
            "initial_state [1, 1, 128, 128] is not [blocks, 2, 128, 128]",
            chunked(),
        ),
        (
            chunked(initial_state=values(2, 2, 128, 128), actual_seq_lengths=torch.tensor([1, 2], dtype=INT)),
            "initial_state has 2 sequences, and of several it is not known whether actual_seq_lengths holds",
            chunked(),
        ),
        (
            chunked(actual_seq_lengths=torch.tensor([0, 3], dtype=INT)),
            "actual_seq_lengths [2] is not known to have 1 entries",
            chunked(),
        ),
        (chunked(actual_seq_lengths=torch.tensor([3])), "actual_seq_lengths is int64", chunked()),
    ],
)
def test_borders_of_the_chunked_rule(outside, reason, inside, assert_border):
    assert_border(CHUNK, outside, reason, inside)


def test_decays_of_chunks_are_refused_as_their_values_are_not_known():
    g = -values(3, 2, dtype=FLOAT).sigmoid()
    assert "g is given, whose values must lie in -1 to 0" in CHUNK.refusal(Target(), **chunked(g=g))
    CHUNK.op(**chunked(g=g))


@pytest.mark.parametrize(
    ("contract", "outside", "reason", "inside"),
    [
        (
            RECURRENT,
            recurrent(tokens=9, lengths=[9], indices=range(9)),
            r"actual_seq_lengths is \[9\], not 1 to 8 each and 9 together",
            recurrent(tokens=8, lengths=[8], indices=range(8)),
        ),
        (
            RECURRENT,
            recurrent(lengths=(0, 3)),
            r"actual_seq_lengths is \[0, 3\], not 1 to 8",
            recurrent(lengths=(1, 2)),
        ),
        (RECURRENT, recurrent(lengths=(1, 1)), r"\[1, 1\], not 1 to 8 each and 3 together", recurrent(lengths=(2, 1))),
        (
            RECURRENT,
            recurrent(indices=(5, 0, 2)),
            r"ssm_state_indices names blocks \[5\] of a state with 5",
            recurrent(indices=(4, 0, 2)),
        ),
        (
            RECURRENT,
            recurrent(indices=(4, -1, 2)),
            r"ssm_state_indices names blocks \[-1\]",
            recurrent(indices=(4, 0, 2)),
        ),
        (
            RECURRENT,
            recurrent(indices=(2, 0, 2)),
            r"ssm_state_indices names blocks \[2\] for more than one sequence",
            recurrent(indices=(0, 2, 2)),
        ),
        (
            RECURRENT,
            recurrent(num_accepted_tokens=torch.tensor([1, 3], dtype=INT)),
            "num_accepted_tokens is 3 for a sequence of 2 tokens",
            recurrent(num_accepted_tokens=torch.tensor([1, 2], dtype=INT)),
        ),
        (
            RECURRENT,
            recurrent(num_accepted_tokens=torch.tensor([0, 2], dtype=INT)),
            "num_accepted_tokens is 0 for a sequence of 1 tokens",
            recurrent(num_accepted_tokens=torch.tensor([1, 1], dtype=INT)),
        ),
        (
            CHUNK,
            chunked(actual_seq_lengths=torch.tensor([2], dtype=INT)),
            r"actual_seq_lengths is \[2\], and there are 3 tokens",
            chunked(),
        ),
        (
            CHUNK,
            chunked(g=torch.full((3, 2), -1.01)),
            "g goes from -1.01 to -1.01",
            chunked(g=torch.full((3, 2), -1.0)),
        ),
        (CHUNK, chunked(g=torch.full((3, 2), 0.01)), "g goes from 0.01 to 0.01", chunked(g=torch.zeros(3, 2))),
    ],
)
def test_values_out_of_range_raise_and_nothing_is_written(contract, outside, reason, inside):
    before = outside["state"].clone() if contract is RECURRENT else None
    with pytest.raises(ValueError, match=f"{contract.name}: .*{reason}"):
        contract.op(**outside)
    assert before is None or torch.equal(outside["state"], before)
    contract.op(**inside)


@pytest.mark.parametrize(("contract", "call"), [(RECURRENT, recurrent()), (CHUNK, chunked())])
def test_opcheck(contract, call):
    torch.library.opcheck(contract.op, (), contract.bind(**call), test_utils=("test_schema", "test_faketensor"))


def test_symbolic_tokens_are_not_refused(symbolic):
    call = {
        "query": symbolic(("T", 2, 128), BRAIN),
        "key": symbolic(("T", 2, 128), BRAIN),
        "value": symbolic(("T", 4, 128), BRAIN),
        "beta": symbolic(("T", 4), BRAIN),
        "scale": 0.25,
    }
    recurrent_call = call | {
        "state": symbolic(("T", 4, 128, 128), BRAIN),
        "actual_seq_lengths": symbolic(("B",), INT),
        "ssm_state_indices": symbolic(("T",), INT),
    }
    assert RECURRENT.refusal(Target(), **recurrent_call) is None
    fewer = recurrent_call | {"state": symbolic(("S", 4, 128, 128), BRAIN)}
    assert "not known to be enough for" in RECURRENT.refusal(Target(), **fewer)
    chunked_call = call | {
        "initial_state": symbolic((1, 4, 128, 128), BRAIN),
        "actual_seq_lengths": symbolic((1,), INT),
    }
    assert CHUNK.refusal(Target(), **chunked_call) is None
    several = chunked_call | {"initial_state": symbolic(("B", 4, 128, 128), BRAIN)}
    assert "and of several it is not known" in CHUNK.refusal(Target(), **several)


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (RECURRENT.refusal(Target(soc), **recurrent()) is None) == (soc in ("ascend910b", "ascend910_93"))
    assert (CHUNK.refusal(Target(soc), **chunked()) is None) == (soc != "ascend310p")
