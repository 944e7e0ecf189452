"""What tests of contracts share: registered ops, tensors of any layout, and fake tensors with symbolic sizes."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from npu_fuse.runtime.ops import OpContract
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

# The symbols there are, and the sizes they stand for in the example.
_EXAMPLES = {"B": 3, "S": 7, "T": 11}


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    register(Target())


@pytest.fixture(scope="session")
def make_tensor() -> Callable[..., torch.Tensor]:
    """Random values of one shape and dtype, in a layout: "plain", "transposed", "sliced" or "expanded"."""

    def make(
        shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: str = "plain", seed: int = 0
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if layout == "transposed":
            return torch.randn(shape[::-1], generator=generator).to(dtype).permute(*reversed(range(len(shape))))
        if layout == "sliced":
            return torch.randn(*shape[:-1], shape[-1] + 3, generator=generator).to(dtype)[..., 1:-2]
        if layout == "expanded":
            return torch.randn(1, *shape[1:], generator=generator).to(dtype).expand(shape)
        return torch.randn(shape, generator=generator).to(dtype)

    return make


@pytest.fixture
def symbolic() -> Iterator[Callable[..., torch.Tensor]]:
    """Fake tensors whose sizes may be symbols: `symbolic(("B", "S", 64))`. The test must install no guard."""
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    all_dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(_EXAMPLES))
    sizes = mode.from_tensor(torch.empty(tuple(_EXAMPLES.values())), symbolic_context=all_dynamic).shape
    symbols = dict(zip(_EXAMPLES, sizes, strict=True))

    def make(shape: tuple[int | str, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with mode:
            return torch.empty([symbols[size] if isinstance(size, str) else size for size in shape], dtype=dtype)

    yield make
    assert not shape_env.guards


@pytest.fixture(scope="session")
def assert_same_layout() -> Callable[..., None]:
    """Results have the shapes, dtypes and strides of the fake ones, and share no memory with the inputs."""

    def check(op: torch._ops.OpOverload, *args: object) -> None:
        def results(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return outputs if isinstance(outputs, tuple) else (outputs,)

        real = results(op(*args))
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            fake = results(op(*fakes))
        assert [(t.shape, t.dtype, t.stride()) for t in real] == [(t.shape, t.dtype, t.stride()) for t in fake]
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor) and arg.numel()}
        assert given.isdisjoint(t.untyped_storage().data_ptr() for t in real if t.numel())

    return check


@pytest.fixture(scope="session")
def assert_border() -> Callable[..., None]:
    """Just outside of a limit a call is refused with the reason and raises it; just inside it is allowed and runs."""

    def check(contract: OpContract, outside: dict[str, object], reason: str, inside: dict[str, object]) -> None:
        assert reason in str(contract.refusal(Target(), **outside))
        assert contract.refusal(Target(), **inside) is None
        with pytest.raises(ValueError, match=f"{contract.name}: ") as raised:
            contract.op(**outside)
        assert reason in str(raised.value)
        contract.op(**inside)

    return check


@pytest.fixture(scope="session")
def pairs_turned() -> Callable[..., torch.Tensor]:
    """The first columns of heads [T, heads, head_dim] turned pair by pair in float64, by cos and sin [T, pairs]."""

    def turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool = True) -> torch.Tensor:
        heads, cos, sin = heads.double(), cos.double(), sin.double()
        out = heads.clone()
        for pair in range(cos.shape[-1]):
            a, b = (pair, pair + cos.shape[-1]) if is_neox_style else (2 * pair, 2 * pair + 1)
            c, s = cos[:, None, pair], sin[:, None, pair]
            out[..., a] = heads[..., a] * c - heads[..., b] * s
            out[..., b] = heads[..., b] * c + heads[..., a] * s
        return out

    return turned
