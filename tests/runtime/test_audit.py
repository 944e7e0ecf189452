"""What an op writes is found by running it, whatever the layout of its arguments."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import npu_fuse


def _store(x: torch.Tensor, cache: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state.add_(x)
    return state, x * 2


def _store_rows(x: torch.Tensor, caches: list[torch.Tensor]) -> None:
    caches[1][0].copy_(x)


def _quietly(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _give_a_part(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache.add_(x)
    return cache[1:]


def _give_one_of(x: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
    return caches[0].add_(x)


@pytest.fixture(autouse=True)
def _ops() -> Iterator[None]:
    with torch.library._scoped_library("npu_fuse_test_audit", "FRAGMENT") as library:
        for schema, run in (
            ("store(Tensor x, Tensor(a!) cache, Tensor state) -> (Tensor, Tensor)", _store),
            ("store_rows(Tensor x, Tensor[] caches) -> ()", _store_rows),
            ("quietly(Tensor x, Tensor(a!) cache) -> Tensor", _quietly),
            ("give_a_part(Tensor x, Tensor cache) -> Tensor", _give_a_part),
            ("give_one_of(Tensor x, Tensor[] caches) -> Tensor", _give_one_of),
        ):
            library.define(schema)
            library.impl(schema.partition("(")[0], run, "CompositeExplicitAutograd")
        yield


def test_an_undeclared_write_is_found_and_the_remedy_named() -> None:
    x, cache, state = torch.randn(3), torch.randn(3), torch.randn(3)
    found = npu_fuse.audit("npu_fuse_test_audit::store", x, cache, state=state)
    assert (found.declared, found.mutated, found.undeclared) == (("cache",), ("state",), ("state",))
    assert found.returned == {0: "state"}
    text = str(found)
    assert "register_side_effects('npu_fuse_test_audit::store', mutates=['state'], returns={0: 'state'})" in text
    assert "declares to write cache, and left it as it was" in text


@pytest.mark.parametrize(("op", "caches"), [("give_a_part", False), ("give_one_of", True)])
def test_a_result_in_the_memory_of_an_argument_is_not_that_argument(op: str, caches: bool) -> None:
    """Registered as that, a graph would go on with the whole of it."""
    cache = torch.randn(3)
    found = npu_fuse.audit(f"npu_fuse_test_audit::{op}", torch.ones(3), [cache] if caches else cache)
    name = "caches" if caches else "cache"
    assert (found.mutated, found.returned, found.views) == ((name,), {}, {0: name})
    assert f"register_side_effects('npu_fuse_test_audit::{op}', mutates=['{name}'])" in str(found)
    assert f"Result 0 lies in the memory of {name}, and a graph takes it for a tensor of its own" in str(found)


def test_what_changes_its_size_is_written() -> None:
    def op(x: torch.Tensor, out: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        kept.append(x)
        return out.resize_(x.shape).copy_(x)

    found = npu_fuse.audit(op, torch.randn(8), torch.randn(2), [torch.randn(2)])
    assert (found.mutated, found.outside, found.returned) == (("out", "kept"), (), {0: "out"})
    assert "register_side_effects" not in str(found)  # it is no op


def test_a_function_of_torch_has_no_names_for_its_arguments() -> None:
    assert npu_fuse.audit(torch.add, torch.ones(2), torch.ones(2), out=torch.zeros(2)).mutated == ("out",)
    assert npu_fuse.audit(torch.Tensor.add_, torch.ones(2), torch.ones(2)).mutated == ("argument 0",)


def test_the_arguments_are_left_as_they_were() -> None:
    x, cache, state = (torch.randn(3) for _ in range(3))
    before = state.clone()
    npu_fuse.audit(torch.ops.npu_fuse_test_audit.store, x, cache, state)
    assert torch.equal(state, before)


def test_strided_arguments_keep_their_layout_and_gaps() -> None:
    pool = torch.randn(4, 6)
    seen = []

    def op(x: torch.Tensor, state: torch.Tensor) -> None:
        seen.append((state.stride(), state.storage_offset()))
        state.add_(x)

    found = npu_fuse.audit(op, torch.ones(2), pool[:, 1:3])
    assert seen == [((6, 1), 1)]
    assert found.mutated == ("state",)
    assert found.outside == ()


def test_a_write_beside_the_argument_is_found() -> None:
    def op(state: torch.Tensor) -> None:
        state.as_strided((2,), (1,), 0).fill_(7)

    found = npu_fuse.audit(op, torch.randn(4, 6)[1:, 2:4])
    assert found.mutated == ()
    assert found.outside == ("state",)
    assert "wrote beside state" in str(found)


@pytest.mark.parametrize("alias", [lambda x: x, lambda x: x[:], lambda x: x.view(3, 1).squeeze(1)])
def test_of_arguments_that_share_memory_the_one_is_named_through_which_it_wrote(alias) -> None:
    x = torch.randn(3)
    found = npu_fuse.audit("npu_fuse_test_audit::store", alias(x), torch.randn(3), x)
    assert found.mutated == ("state",)


def test_an_argument_whose_elements_share_memory_is_audited() -> None:
    def op(x: torch.Tensor) -> None:
        x[0] = 3

    found = npu_fuse.audit(op, torch.randn(1).expand(4))
    assert found.mutated == ("x",)


def test_lists_are_looked_into() -> None:
    found = npu_fuse.audit("npu_fuse_test_audit::store_rows", torch.randn(2), [torch.randn(3, 2), torch.randn(3, 2)])
    assert found.mutated == ("caches",)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.complex64])
def test_other_types(dtype: torch.dtype) -> None:
    def op(x: torch.Tensor, y: torch.Tensor) -> None:
        y[1:] = x[1:]

    found = npu_fuse.audit(op, torch.ones(4).to(dtype), torch.zeros(4).to(dtype))
    assert found.mutated == ("y",)


def test_nan_is_no_change_of_nan() -> None:
    assert npu_fuse.audit("npu_fuse_test_audit::quietly", torch.randn(2), torch.full((2,), torch.nan)).mutated == ()


def test_tensors_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        npu_fuse.audit("npu_fuse_test_audit::quietly", torch.randn(2), torch.randn(2, device="meta"))
    with FakeTensorMode():
        fake = torch.randn(2)
    with pytest.raises(ValueError, match="no values"):
        npu_fuse.audit("npu_fuse_test_audit::quietly", fake, torch.randn(2))
