"""States keep their shape and change their memory: the kernel's pool is a view of them."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update

from npu_fuse.runtime import conv_state
from npu_fuse.runtime.ops.causal_conv1d import CAUSAL_CONV1D, PREFILL, UPDATE
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target
from tiny_models import build, prompt


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register(Target())


@pytest.fixture(autouse=True)
def _no_copies():
    """A pool that is a copy warns, which fails a test that doesn't expect it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="npu_fuse")
        yield


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


LAYOUTS = {
    "transposed": lambda states: states.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2),
    "plain": lambda states: states.clone(),
    "sliced": lambda states: torch.cat((states, states), 2)[:, :, states.shape[2] :],
}


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("unread", [0, 1, 2])
@pytest.mark.parametrize("slots", [1, 3])
def test_the_pool_is_a_view_that_starts_with_what_is_read(width, unread, slots):
    given = values(slots, 16, width - 1 + unread)
    states = conv_state.in_pool_memory(given)
    assert torch.equal(states, given)
    assert states.shape == given.shape
    assert conv_state.has_pool_memory(states)
    pool = conv_state.pool(states, width)
    assert pool.is_contiguous()
    assert pool.shape == (slots, width - 1 + unread, 16)
    assert torch.equal(pool[:, : width - 1], given[..., unread:].transpose(1, 2))
    pool[:, : width - 1] = 7
    assert (states[..., unread:] == 7).all()
    assert torch.equal(states[..., :unread], given[..., :unread])


@pytest.mark.parametrize("run_mode", [PREFILL, UPDATE])
@pytest.mark.parametrize("layout", ["pool memory", *LAYOUTS])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("unread", [0, 1, 3])
def test_the_op_writes_what_is_read_and_no_other_column(width, unread, layout, run_mode):
    given, x, weight = values(3, 16, width - 1 + unread), values(3, 2, 16, seed=1), values(width, 16, seed=2)
    states = conv_state.in_pool_memory(given) if layout == "pool memory" else LAYOUTS[layout](given)
    plain = given[..., unread:].transpose(1, 2).clone(memory_format=torch.contiguous_format)
    flags = {} if run_mode == UPDATE else {"has_initial_state": torch.tensor([True, False, True])}
    expected = CAUSAL_CONV1D.op(x, weight, plain, run_mode=run_mode, **flags)
    with warnings.catch_warnings():
        if layout != "pool memory":
            warnings.simplefilter("ignore")
        pool = conv_state.pool(states, width)
    assert torch.equal(CAUSAL_CONV1D.op(x, weight, pool, run_mode=run_mode, **flags), expected)
    conv_state.write_back(states, pool)
    assert torch.equal(states[..., unread:], plain.transpose(1, 2))
    assert torch.equal(states[..., :unread], given[..., :unread])


@pytest.mark.parametrize(
    ("layout", "unread", "is_view"),
    [("transposed", 0, True), ("transposed", 1, False), ("plain", 0, False), ("sliced", 0, False)],
)
def test_memory_that_does_not_hold_the_pool_is_copied_with_a_warning(layout, unread, is_view):
    states = LAYOUTS[layout](values(2, 16, 3 + unread))
    if is_view:
        assert conv_state.pool(states, 4).data_ptr() == states.data_ptr()
        return
    with pytest.warns(UserWarning, match=r"states \[2, 16, \d\] with strides .* are copied for each call"):
        pool = conv_state.pool(states, 4)
    assert pool.shape == (2, 3, 16)
    pool += 1
    conv_state.write_back(states, pool)
    assert torch.equal(states[..., unread:], pool.transpose(1, 2))


def test_new_states_are_zeros_of_their_own():
    states = conv_state.new_states(2, 16, 4, dtype=torch.bfloat16)
    assert (states.shape, states.dtype) == ((2, 16, 4), torch.bfloat16)
    assert not states.any()
    assert conv_state.pool(states, 4).shape == (2, 4, 16)


@pytest.mark.parametrize("layout", ["transposed", "plain"])
def test_a_symbolic_layout_is_known_without_guards(layout):
    shape_env = ShapeEnv()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC])
    fake = FakeTensorMode(shape_env=shape_env).from_tensor(LAYOUTS[layout](values(3, 16, 4)), symbolic_context=dynamic)
    assert isinstance(fake.shape[0], torch.SymInt)
    assert conv_state.has_pool_memory(fake) == (layout == "transposed")
    assert not shape_env.guards


LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 0,
    "mlp_only_layers": [0, 1],
}
MODELS = {"qwen3_next": LINEAR, "lfm2": {"layer_types": ["conv", "full_attention"]}}


def stepped(model, adopted):
    """Prefill, a chunk and three tokens: the logits of each step, and the cache."""
    ids = prompt()
    logits, cache = [], None
    with torch.no_grad():
        for tokens in ids.split([9, 4, 1, 1, 1], dim=1):
            out = model(tokens, cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits)
            if adopted and len(logits) == 1:
                assert conv_state.adopt(cache) == 1
    return logits, cache


@pytest.mark.parametrize("model_type", MODELS)
def test_a_cache_of_transformers_keeps_its_values_and_the_memory_it_is_given(model_type):
    model = build(model_type, **MODELS[model_type])
    logits, cache = stepped(model, adopted=False)
    adopted_logits, adopted = stepped(model, adopted=True)
    assert all(torch.equal(a, b) for a, b in zip(logits, adopted_logits, strict=True))
    plain, states = (one.layers[0].conv_states[0] for one in (cache, adopted))
    assert torch.equal(plain, states)
    assert plain.is_contiguous()
    width = states.shape[2]
    pool = conv_state.pool(states, width)
    assert pool.untyped_storage().data_ptr() == states.untyped_storage().data_ptr()
    assert torch.equal(pool[:, : width - 1], states[..., 1:].transpose(1, 2))
    assert conv_state.adopt(adopted) == 0


@pytest.mark.parametrize("columns", [3, 4])
def test_a_token_through_the_op_leaves_the_states_of_transformers_own_update(columns):
    """Beside the op there is one column to move, where the states have one that is never read."""
    given, x, weight = values(2, 32, columns), values(2, 32, 1, seed=1), values(32, 4, seed=2)
    plain, states = given.clone(), conv_state.in_pool_memory(given)
    expected = causal_conv1d_update(x, plain, weight, activation="silu")
    states[..., : columns - 3] = states[..., 1 : columns - 2]
    rows, pool = x.transpose(1, 2).contiguous(), conv_state.pool(states, 4)
    found = CAUSAL_CONV1D.op(rows, weight.T.contiguous(), pool, activation_mode=1, run_mode=UPDATE)
    assert torch.equal(states, plain)
    torch.testing.assert_close(found.transpose(1, 2), expected, rtol=2e-3, atol=1e-3)


def test_the_address_stays_until_the_cache_is_reordered():
    model = build("qwen3_next", **LINEAR)
    with torch.no_grad():
        cache = model(prompt(), use_cache=True).cache
        conv_state.adopt(cache)
        layer = cache.layers[0]
        states = layer.conv_states[0]
        marked = states._dynamo_static_input_type
        model(prompt()[:, :1], cache=cache, use_cache=True)
        assert layer.conv_states[0] is states
        layer.reset()
        assert layer.conv_states[0] is states
        assert not states.any()
        layer.reorder_cache(torch.tensor([1, 0]))
    assert layer.conv_states[0] is not states
    assert not conv_state.has_pool_memory(layer.conv_states[0])
    assert conv_state.adopt(cache) == 1
    assert conv_state.has_pool_memory(layer.conv_states[0])
    assert marked == "unguarded"


def test_a_layer_that_records_the_past_is_left_alone():
    model = build("qwen3_next", **LINEAR)
    with torch.no_grad():
        cache = model(prompt(), use_cache=True).cache
        cache.layers[0].activate_past_recording()
        states = cache.layers[0].conv_states[0]
        assert conv_state.adopt(cache) == 0
        assert cache.layers[0].conv_states[0] is states
        model(prompt()[:, :1], cache=cache, use_cache=True)
    assert cache.layers[0].conv_states[0] is not states
