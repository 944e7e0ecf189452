"""Packed weights are never stale, take no memory twice, and cut no one off."""

import copy
import pathlib
import warnings

import pytest
import torch
from torch import nn

from npu_fuse.runtime.weights import can_pack, pack


def parameters(*rows: int, columns: int = 4, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(n, columns, dtype=dtype)) for n in rows]


def is_packed(weights: list[nn.Parameter]) -> bool:
    return len({w.untyped_storage().data_ptr() for w in weights}) == 1


def test_packs_once_and_gives_views_after() -> None:
    weights = parameters(4, 2, 2)
    wanted = torch.cat([w.detach() for w in weights])
    packed = pack(weights)
    assert torch.equal(packed, wanted)
    assert is_packed(weights)
    again = pack(weights)
    assert again.data_ptr() == packed.data_ptr() == weights[0].data_ptr()
    assert torch.equal(torch.cat([w.detach() for w in weights]), wanted)


@pytest.mark.parametrize("write", ["copy_", "data", "index"])
def test_a_write_in_place_is_seen(write: str) -> None:
    weights = parameters(4, 2, 2)
    pack(weights)
    new = torch.randn(2, 4)
    with torch.no_grad():
        if write == "copy_":
            weights[1].copy_(new)
        elif write == "data":
            weights[1].data.copy_(new)
        else:
            weights[1][:] = new
    assert torch.equal(pack(weights)[4:6], new)


def test_a_replaced_parameter_is_packed_again() -> None:
    weights = parameters(4, 2, 2)
    pack(weights)
    for _ in range(2):
        new = torch.randn(2, 4)
        weights[1].data = new.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(pack(weights), torch.cat([weights[0].detach(), new, weights[2].detach()]))
        assert is_packed(weights)


def test_load_state_dict_by_copy_and_by_assignment() -> None:
    modules = nn.ModuleList(nn.Linear(4, n, bias=False) for n in (4, 2, 2))
    pack([m.weight for m in modules])
    for assign in (False, True, False):
        state = {name: torch.randn_like(value) for name, value in modules.state_dict().items()}
        modules.load_state_dict(state, assign=assign)
        wanted = torch.cat(list(state.values()))
        del state  # as long as someone holds what was assigned, it can't move
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(pack([m.weight for m in modules]), wanted)
        assert is_packed([m.weight for m in modules])


def test_a_move_to_another_type_is_packed_again() -> None:
    modules = nn.ModuleList(nn.Linear(4, n, bias=False) for n in (4, 2))
    pack([m.weight for m in modules])
    modules.to(torch.bfloat16)
    packed = pack([m.weight for m in modules])
    assert packed.dtype == torch.bfloat16
    assert is_packed([m.weight for m in modules])


def test_a_copy_of_the_model_has_weights_of_its_own() -> None:
    modules = nn.ModuleList(nn.Linear(4, n, bias=False) for n in (4, 2))
    pack([m.weight for m in modules])
    other = copy.deepcopy(modules)
    with torch.no_grad():
        other[0].weight.zero_()
    assert modules[0].weight.abs().sum() > 0
    assert torch.equal(pack([m.weight for m in other])[:4], torch.zeros(4, 4))


def test_a_storage_that_others_use_is_left_alone() -> None:
    weights = parameters(4, 2)
    alias = weights[0].detach()
    address = weights[0].data_ptr()
    with pytest.warns(UserWarning, match="can't be moved into one storage"):
        packed = pack(weights)
    assert weights[0].data_ptr() == address
    with torch.no_grad():
        alias.fill_(7)
    with pytest.warns(UserWarning, match="can't be moved"):
        packed = pack(weights)
    assert torch.equal(packed[:4], torch.full((4, 4), 7.0))


@pytest.mark.parametrize("start", [0, 2, 3])
def test_weights_that_share_rows_go_on_sharing_them(start: int) -> None:
    rows = torch.randn(8, 4)
    weights = [nn.Parameter(rows[start : start + 4]), nn.Parameter(rows[:4])]
    del rows
    assert not can_pack(weights)
    with pytest.warns(UserWarning, match="can't be moved"):
        pack(weights)
    with torch.no_grad():
        weights[1].fill_(7)
    assert torch.equal(weights[0][: 4 - start], torch.full((4 - start, 4), 7.0))


def test_weights_that_lie_apart_in_one_storage_are_put_in_order() -> None:
    rows = torch.randn(8, 4)
    weights = [nn.Parameter(rows[4:]), nn.Parameter(rows[:4])]
    wanted = torch.cat((rows[4:], rows[:4]))
    del rows
    assert can_pack(weights)
    assert torch.equal(pack(weights), wanted)


def test_tensors_that_are_no_parameters_are_copied_on_each_call() -> None:
    weights = [torch.randn(4, 4), torch.randn(2, 4)]
    with pytest.warns(UserWarning, match="no parameters"):
        assert torch.equal(pack(weights), torch.cat(weights))


def test_a_weight_given_twice_is_copied() -> None:
    (weight,) = parameters(2)
    with pytest.warns(UserWarning, match="can't be moved"):
        assert torch.equal(pack([weight, weight]), torch.cat([weight.detach()] * 2))


def test_works_under_inference_mode_and_stays_usable_after() -> None:
    weights = parameters(4, 2)
    with torch.inference_mode():
        pack(weights)
    assert is_packed(weights)
    weights[0].sum().backward()
    assert weights[0].grad is not None


def test_biases_are_packed_alike() -> None:
    biases = [nn.Parameter(torch.randn(n)) for n in (4, 2)]
    wanted = torch.cat([b.detach() for b in biases])
    assert torch.equal(pack(biases), wanted)
    assert torch.equal(pack(biases), wanted)


def test_weights_made_under_inference_mode_are_left_alone() -> None:
    with torch.inference_mode():
        weights = parameters(4, 2)
        for _ in range(2):
            with pytest.warns(UserWarning, match="can't be moved"):
                assert torch.equal(pack(weights), torch.cat(weights))
        assert weights[0].sum().isfinite()


def test_weights_in_shared_memory_stay_there() -> None:
    weights = parameters(4, 2)
    for weight in weights:
        weight.share_memory_()
    assert not can_pack(weights)
    with pytest.warns(UserWarning, match="can't be moved"):
        pack(weights)
    assert all(weight.is_shared() for weight in weights)


def test_weights_that_are_mapped_from_a_file_stay_there(tmp_path: pathlib.Path) -> None:
    torch.save([w.detach() for w in parameters(4, 2)], tmp_path / "weights")
    loaded = torch.load(tmp_path / "weights", mmap=True)
    assert not can_pack([nn.Parameter(tensor) for tensor in loaded])
