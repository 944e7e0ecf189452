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


@pytest.fixture(autouse=True)
def _ops() -> Iterator[None]:
    with torch.library._scoped_library("npu_fuse_test_audit", "FRAGMENT") as library:
        for schema, run in (
            ("store(Tensor x, Tensor(a!) cache, Tensor state) -> (Tensor, Tensor)", _store),
            ("store_rows(Tensor x, Tensor[] caches) -> ()", _store_rows),
            ("quietly(Tensor x, Tensor(a!) cache) -> Tensor", _quietly),
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
