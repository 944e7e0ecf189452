"""npu_kv_rmsnorm_rope_cache against float64 maths, slot by slot, with what it leaves alone, and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.kv_rmsnorm_rope_cache import NPU_KV_RMSNORM_ROPE_CACHE as FIRST
from npu_fuse.runtime.ops.kv_rmsnorm_rope_cache import NPU_KV_RMSNORM_ROPE_CACHE_V2 as SECOND
from npu_fuse.runtime.target import Target

HALF, BRAIN = torch.float16, torch.bfloat16
LATENT, ROPE, BLOCKS, BLOCK_SIZE = 512, 64, 3, 16


def call(mode="PA_BNSD", *, batch=2, tokens=3, dtype=HALF, table_tokens=None, slots=None, **rest):
    """A legal call, changed."""
    torch.manual_seed(batch * 100 + tokens)
    angles = torch.rand(batch, 1, tokens if table_tokens is None else table_tokens, ROPE // 2) * 6
    tables = {"cos": angles.cos(), "sin": angles.sin()}
    paged = mode != "Norm"
    leading = (BLOCKS, BLOCK_SIZE, 1) if paged else (batch, 1, 20)
    count = batch * tokens
    index = torch.tensor(slots) if slots is not None else torch.arange(count) * 5
    arguments = {
        "kv": torch.randn(batch, 1, tokens, LATENT + ROPE).to(dtype),
        "gamma": (torch.rand(LATENT) + 0.5).to(dtype),
        **{name: torch.cat([half, half], -1).to(dtype) for name, half in tables.items()},
        "index": index if paged else index.view(batch, tokens) % 20,
        "k_cache": torch.full((*leading, ROPE), -7.0, dtype=dtype),
        "ckv_cache": torch.full((*leading, LATENT), -7.0, dtype=dtype),
        "cache_mode": mode,
        "is_output_kv": paged,
    }
    return arguments | rest


def exact(arguments, epsilon=1e-5):
    """The rotated k and the normed latent in float64, element by element."""
    kv, gamma, cos, sin = (arguments[name].double() for name in ("kv", "gamma", "cos", "sin"))
    latent, k = kv[..., :LATENT], kv[..., LATENT:]
    normed = latent / (latent.square().sum(-1, keepdim=True) / LATENT + epsilon).sqrt() * gamma
    turned = torch.empty_like(k)
    half = ROPE // 2
    for i in range(half):
        first, second = k[..., 2 * i], k[..., 2 * i + 1]
        turned[..., i] = first * cos[..., i] - second * sin[..., i]
        turned[..., half + i] = second * cos[..., half + i] + first * sin[..., half + i]
    return turned, normed


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("mode", ["PA", "PA_BNSD", "Norm"])
@pytest.mark.parametrize(("tokens", "table_tokens"), [(1, 1), (3, 3)])
def test_it_is_the_maths_rounded_once(dtype, mode, tokens, table_tokens):
    arguments = call(mode, tokens=tokens, table_tokens=table_tokens, dtype=dtype)
    assert SECOND.refusal(Target(), **arguments) is None
    expected = exact(arguments)
    SECOND.op(**arguments)
    tolerance = {HALF: 2**-11, BRAIN: 2**-8}[dtype]
    for cache, wanted in zip((arguments["k_cache"], arguments["ckv_cache"]), expected, strict=True):
        for b in range(2):
            for t in range(tokens):
                slot = arguments["index"].view(2, tokens)[b, t]
                row = cache.view(-1, cache.shape[-1])[slot] if mode != "Norm" else cache[b, 0, slot]
                # half a unit of the last place of the exact value, and a little of the sum's own rounding
                torch.testing.assert_close(row.double(), wanted[b, 0, t], rtol=tolerance * 1.01, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(slots=st.lists(st.integers(-1, BLOCKS * BLOCK_SIZE - 1), min_size=4, max_size=4, unique=True))
def test_other_slots_keep_what_they_held_and_minus_one_writes_nothing(slots):
    arguments = call(batch=4, tokens=1, slots=slots)
    turned, normed = SECOND.op(**arguments)
    for cache, results in ((arguments["k_cache"], turned), (arguments["ckv_cache"], normed)):
        rows = dict(zip(slots, results.flatten(0, 2), strict=True))
        for slot, row in enumerate(cache.view(-1, cache.shape[-1])):
            assert torch.equal(row, rows.get(slot, torch.full_like(row, -7)))


def test_results_are_what_is_written_or_uninitialised():
    arguments = call()
    turned, normed = SECOND.op(**arguments)
    assert turned.shape == (2, 1, 3, ROPE)
    assert normed.shape == (2, 1, 3, LATENT)
    assert not turned.isnan().any()
    assert all(result.isnan().all() for result in SECOND.op(**call(is_output_kv=False)))
    assert all(result.isnan().all() for result in SECOND.op(**call("Norm")))


def test_the_first_version_gives_the_caches_themselves():
    arguments = call()
    k_cache, ckv_cache, *results = FIRST.op(**arguments)
    assert k_cache.data_ptr() == arguments["k_cache"].data_ptr()
    assert ckv_cache.data_ptr() == arguments["ckv_cache"].data_ptr()
    again = call()
    for result, other in zip(results, SECOND.op(**again), strict=True):
        assert torch.equal(result, other)
    assert torch.equal(k_cache, again["k_cache"])
    assert torch.equal(ckv_cache, again["ckv_cache"])


@pytest.mark.parametrize("mode", ["PA_BNSD", "Norm"])
def test_opcheck(mode):
    arguments = call(mode, is_output_kv=False)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2, (), arguments, test_utils=checks)


def test_symbolic_batches_are_not_refused(symbolic):
    tables = [symbolic(("B", 1, 1, ROPE), HALF) for _ in range(2)]
    caches = [symbolic(("T", 16, 1, width), HALF) for width in (ROPE, LATENT)]
    arguments = (symbolic(("B", 1, 1, 576), HALF), torch.ones(LATENT, dtype=HALF), *tables)
    index = symbolic(("B",), torch.int64)
    assert SECOND.refusal(Target(), *arguments, index, *caches, cache_mode="PA") is None
    assert "is not known to be" in SECOND.refusal(
        Target(), *arguments, symbolic(("S",), torch.int64), *caches, cache_mode="PA"
    )


def zeros(*shape, dtype=HALF):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (call(cache_mode="PA_NZ"), "cache_mode 'PA_NZ' is not covered", call()),
        (call(dtype=torch.float32), "kv is float32 (the kernel takes float16, bfloat16)", call(dtype=BRAIN)),
        (call(gamma=torch.ones(LATENT)), "gamma is float32 (the kernel", call()),
        (
            call(k_cache=zeros(BLOCKS, BLOCK_SIZE, 1, ROPE, dtype=BRAIN)),
            "k_cache is bfloat16 but kv is float16",
            call(),
        ),
        (call(kv=zeros(2, 3, 576)), "kv has 3 dims", call()),
        (call(kv=zeros(2, 2, 3, 576)), "kv [2, 2, 3, 576] is not [B, 1, S, 576]", call()),
        (call(kv=zeros(2, 1, 3, 320)), "kv [2, 1, 3, 320] is not [B, 1, S, 576]", call()),
        (call(kv=zeros(2, 1, 3, 1152)[..., ::2]), "kv [2, 1, 3, 576] with strides", call()),
        (call(kv=zeros(0, 1, 3, 576)), "kv [0, 1, 3, 576] is empty", call()),
        (call(gamma=zeros(256)), "gamma [256] is not [512]", call()),
        (call(cos=zeros(2, 1, 3, 32)), "cos [2, 1, 3, 32] is not [2, 1, 3, 64]", call()),
        (call(cos=zeros(1, 1, 3, 64)), "cos [1, 1, 3, 64] is not [2, 1, 3, 64]", call()),
        (call(table_tokens=1), "cos [2, 1, 1, 64] is not [2, 1, 3, 64]", call(table_tokens=1, is_output_kv=False)),
        (
            call(sin=zeros(2, 1, 1, 64), is_output_kv=False),
            "cos [2, 1, 3, 64] and sin [2, 1, 1, 64] differ",
            call(is_output_kv=False),
        ),
        (
            call(k_cache=zeros(6, 8, 1, 64), ckv_cache=zeros(6, 8, 1, 512)),
            "k_cache has blocks of 8, not known to be a multiple of 16",
            call(k_cache=zeros(3, 16, 1, 64), ckv_cache=zeros(3, 16, 1, 512)),
        ),
        (call(k_cache=zeros(3, 16, 64)), "k_cache has 3 dims", call()),
        (call(k_cache=zeros(3, 16, 1, 128)), "k_cache [3, 16, 1, 128] is not [blocks, block_size, 1, 64]", call()),
        (
            call(k_cache=zeros(3, 16, 2, 64), ckv_cache=zeros(3, 16, 2, 512)),
            "k_cache [3, 16, 2, 64] is not [blocks, block_size, 1, 64]",
            call(),
        ),
        (call(ckv_cache=zeros(4, 16, 1, 512)), "k_cache [3, 16, 1, 64] and ckv_cache [4, 16, 1, 512] differ", call()),
        (
            call("Norm", k_cache=zeros(3, 1, 20, 64), is_output_kv=False),
            "k_cache [3, 1, 20, 64] is not for a batch of 2",
            call("Norm"),
        ),
        (call(index=torch.arange(6, dtype=torch.int32)), "index is int32 (the kernel takes int64)", call()),
        (call(index=torch.arange(6).view(2, 3)), "index [2, 3] is not known to be [6]", call()),
        (call(index=torch.arange(12)[::2]), "index [6] with strides [2] is not contiguous", call()),
        (call(index=torch.arange(5)), "index [5] is not known to be [6]", call()),
        (call(v=zeros(2, 1, 3, 128)), "v is given (npu_fuse supports its default alone", call()),
        (call(k_rope_scale=zeros(64)), "k_rope_scale is given", call()),
    ],
)
def test_limits(outside, reason, inside):
    assert reason in SECOND.refusal(Target(), **outside)
    with pytest.raises(ValueError, match="npu_kv_rmsnorm_rope_cache_v2: "):
        SECOND.op(**outside)
    assert SECOND.refusal(Target(), **inside) is None
    SECOND.op(**inside)


def test_a_batch_has_a_limit():
    def on_meta(batch):
        tensors = call(kv=zeros(batch, 1, 1, 576), table_tokens=1, index=torch.arange(batch))
        tensors |= {"cos": zeros(batch, 1, 1, ROPE), "sin": zeros(batch, 1, 1, ROPE)}
        return {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}

    assert "has a batch of 65536 (the kernel takes 65535)" in SECOND.refusal(Target(), **on_meta(65536))
    assert SECOND.refusal(Target(), **on_meta(65535)) is None


def test_results_that_are_never_there_are_not_asked_for():
    assert "is_output_kv is given in cache_mode Norm" in SECOND.refusal(Target(), **call("Norm", is_output_kv=True))


def test_there_is_no_kernel_on_other_socs():
    assert "no kernel on ascend310p" in SECOND.refusal(Target(soc="ascend310p"), **call())


@pytest.mark.parametrize("slots", [[0, 1, 2, 3, 4, 48], [0, -2, 1, 2, 3, 4]])
def test_slots_outside_are_an_error(slots):
    with pytest.raises(ValueError, match="index names slots"):
        SECOND.op(**call(slots=slots))
    SECOND.op(**call(slots=[0, -1, 1, 2, 3, 47]))
