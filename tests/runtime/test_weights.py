"""Packed weights are never stale, take no memory twice, and cut no one off."""

import copy
import pathlib
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import npu_fuse
from npu_fuse.runtime.weights import can_pack, pack, transposed, was_moved


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


def test_what_was_moved_stays_where_it_is_whoever_uses_it() -> None:
    """Such as a graph that was captured with it: another one may be compiled for the same memory."""
    weights, others, filters = parameters(4, 2), parameters(4, 2), [nn.Parameter(torch.randn(8, 1, 3))]
    held = [pack(weights), transposed(filters[0]), *(weight.detach() for weight in others)]
    assert not can_pack(weights)
    assert not can_pack(filters)
    assert was_moved(weights, pack)
    assert was_moved(filters, transposed)
    assert not was_moved(weights[::-1], pack)
    assert not was_moved([weights[0], others[1]], pack)
    assert not was_moved(others, pack)
    weights[1].data = weights[1].data.clone()
    assert not was_moved(weights, pack)
    assert len(held) == 4


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


# The weight of a depthwise convolution --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 1, 4), (6, 4), (1, 1, 4), (6, 1, 1)])
def test_taps_come_first_and_the_parameter_keeps_its_shape(shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.randn(shape))
    wanted = weight.detach().reshape(shape[0], -1).t().clone()
    taps = transposed(weight)
    assert taps.is_contiguous()
    assert torch.equal(taps, wanted)
    assert weight.shape == shape
    assert torch.equal(weight.detach().reshape(shape[0], -1), wanted.t())
    assert transposed(weight).data_ptr() == taps.data_ptr() == weight.data_ptr()
    assert weight.untyped_storage().nbytes() == weight.numel() * weight.itemsize


@pytest.mark.parametrize("write", ["copy_", "data", "load", "replace", "assign", "cast"])
def test_a_new_conv_weight_is_seen(write: str) -> None:
    conv = nn.Conv1d(6, 6, 4, groups=6, bias=False)
    transposed(conv.weight)
    new = torch.randn(6, 1, 4)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        if write == "copy_":
            conv.weight.copy_(new)
        elif write == "data":
            conv.weight.data.copy_(new)
        elif write in ("load", "assign"):
            conv.load_state_dict({"weight": new.clone()}, assign=write == "assign")
        elif write == "replace":
            conv.weight.data = new.clone()
        else:
            new = conv.to(torch.bfloat16).weight.detach().clone()
        taps = transposed(conv.weight)
    assert torch.equal(taps, new.squeeze(1).t())
    assert taps.data_ptr() == conv.weight.data_ptr()


def test_a_conv_weight_that_others_share_is_left_alone() -> None:
    weight = nn.Parameter(torch.randn(6, 1, 4))
    alias = weight.detach()
    with pytest.warns(UserWarning, match="can't be moved"):
        taps = transposed(weight)
    assert weight.data_ptr() == alias.data_ptr()
    assert torch.equal(taps, alias.squeeze(1).t())


# Frameworks -----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Separate projections of one x, which a compiled call packs."""

    def __init__(self, q: nn.Module | None = None) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 64, bias=False) if q is None else q
        self.k_proj, self.v_proj = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def rope(x: torch.Tensor) -> torch.Tensor:
            x = x.view(x.shape[0], -1, 16)
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat((-b, a), -1) * sin

        return rope(self.q_proj(x)), rope(self.k_proj(x)), self.v_proj(x)


def inputs() -> tuple[torch.Tensor, ...]:
    angles = torch.rand(5, 1, 8).repeat(1, 1, 2)
    return torch.randn(5, 32), angles.cos(), angles.sin()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=npu_fuse.Backend(strict=True))


def agrees(model: nn.Module, through: nn.Module) -> bool:
    """Whether the compiled model computes with the weights that the model has now."""
    arguments = inputs()
    with torch.no_grad():
        pairs = zip(through(*arguments), copy.deepcopy(model)(*arguments), strict=True)
        return all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def weights_of(model: Attention) -> list[nn.Parameter]:
    return [model.q_proj.weight, model.k_proj.weight, model.v_proj.weight]


@pytest.fixture
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh")
class TestCompiledModel:
    def test_its_weights_take_no_memory_twice(self) -> None:
        model = Attention()
        through = compiled(model)
        assert agrees(model, through)
        assert is_packed(weights_of(model))
        assert model.q_proj.weight.untyped_storage().nbytes() == sum(w.numel() * 4 for w in weights_of(model))

    @pytest.mark.parametrize("assign", [False, True])
    def test_load_state_dict(self, assign: bool) -> None:
        model = Attention()
        through = compiled(model)
        for _ in range(2):
            assert agrees(model, through)
            model.load_state_dict(Attention().state_dict(), assign=assign)
        assert agrees(model, through)

    def test_parameters_that_are_swapped(self) -> None:
        """torch swaps only tensors that nothing refers to weakly: no graph may remember what it was compiled for."""
        model = Attention()
        through = torch.compile(model, backend="npu_fuse")
        assert agrees(model, through)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.load_state_dict(Attention().state_dict())
            assert agrees(model, through)
            model.double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert model.q_proj.weight.dtype == torch.float64

    def test_writes_of_every_kind(self) -> None:
        model = Attention()
        through = compiled(model)
        assert agrees(model, through)
        with torch.no_grad():
            model.q_proj.weight.mul_(2)
            assert agrees(model, through)
            model.k_proj.weight.data.copy_(torch.randn(32, 32))
            assert agrees(model, through)
            model.v_proj.weight.data = torch.randn(32, 32)
            assert agrees(model, through)
            model.v_proj.weight = nn.Parameter(torch.randn(32, 32))
            assert agrees(model, through)

    def test_a_cast_there_and_back(self) -> None:
        model = Attention()
        through = compiled(model)
        assert agrees(model, through)
        model.double().float()
        assert agrees(model, through)

    def test_a_module_that_two_models_share(self) -> None:
        shared = nn.Linear(32, 64, bias=False)
        models = Attention(shared), Attention(shared)
        throughs = [compiled(model) for model in models]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the second model can't pack the shared weight, and says so
            for _ in range(2):
                for model, through in zip(models, throughs, strict=True):
                    assert agrees(model, through)
                with torch.no_grad():
                    shared.weight.mul_(2)

    def test_one_parameter_in_two_modules(self) -> None:
        model = Attention()
        model.v_proj.weight = model.k_proj.weight
        through = compiled(model)
        assert agrees(model, through)
        with torch.no_grad():
            model.k_proj.weight.mul_(2)
        assert agrees(model, through)
        assert model.v_proj.weight is model.k_proj.weight

    def test_an_embedding_that_is_tied_to_a_projection(self) -> None:
        model = Attention()
        embedding = nn.Embedding(64, 32)
        embedding.weight = model.q_proj.weight
        through = compiled(model)
        assert agrees(model, through)
        with torch.no_grad():
            embedding.weight.normal_()
        assert agrees(model, through)
        assert torch.equal(embedding(torch.tensor(3)), model.q_proj.weight[3])

    def test_two_compilations_of_one_model(self) -> None:
        model = Attention()
        throughs = [compiled(model), torch.compile(model, backend="npu_fuse")]
        for _ in range(2):
            assert all(agrees(model, through) for through in throughs)
            address = model.q_proj.weight.data_ptr()
            with torch.no_grad():
                model.q_proj.weight.mul_(2)
        assert model.q_proj.weight.data_ptr() == address

    def test_a_patched_module(self) -> None:
        """As LoRA does it: a projection is wrapped, and its delta merged and taken out again."""

        class Patched(nn.Module):
            def __init__(self, base: nn.Linear) -> None:
                super().__init__()
                self.base = base
                self.a, self.b = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.randn(64, 4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.base(x) + x @ self.a.T @ self.b.T

        model = Attention()
        through = compiled(model)
        assert agrees(model, through)
        base = model.q_proj
        model.q_proj = Patched(base)
        assert agrees(model, through)
        with torch.no_grad():
            base.weight.data += model.q_proj.b @ model.q_proj.a
        model.q_proj = base
        assert agrees(model, through)

    def test_weights_that_come_after_compiling(self) -> None:
        with torch.device("meta"):
            model = Attention()
        through = compiled(model)
        with torch.no_grad():
            assert through(*(value.to("meta") for value in inputs()))[0].is_meta
        model.to_empty(device="cpu")
        model.load_state_dict(Attention().state_dict())
        assert agrees(model, through)

    def test_weights_that_are_fake(self) -> None:
        with FakeTensorMode():
            model = Attention()
            with torch.no_grad():
                outputs = compiled(model)(*inputs())
        assert [tuple(value.shape) for value in outputs] == [(5, 4, 16), (5, 2, 16), (5, 32)]

    def test_a_state_dict_goes_round(self, tmp_path: pathlib.Path) -> None:
        model, other = Attention(), Attention()
        through, other_through = compiled(model), compiled(other)
        assert agrees(model, through)
        torch.save(model.state_dict(), tmp_path / "weights")
        for assign in (False, True):
            other.load_state_dict(torch.load(tmp_path / "weights"), assign=assign)
            assert agrees(other, other_through)
            assert all(map(torch.equal, weights_of(other), weights_of(model)))

    def test_safetensors_after_unpacking(self, tmp_path: pathlib.Path) -> None:
        safetensors = pytest.importorskip("safetensors.torch")
        model = Attention()
        model.conv = nn.Conv1d(6, 6, 4, groups=6, bias=False)
        through = compiled(model)
        assert agrees(model, through)
        transposed(model.conv.weight)
        with pytest.raises(ValueError, match="non contiguous"):
            safetensors.save_file(model.state_dict(), tmp_path / "weights")
        with pytest.raises(RuntimeError, match="covering the entire storage"):
            safetensors.save_model(model, tmp_path / "weights")
        identities = list(model.parameters())
        npu_fuse.unpack(model)
        assert all(a is b for a, b in zip(model.parameters(), identities, strict=True))
        assert not is_packed(weights_of(model))
        safetensors.save_model(model, tmp_path / "weights")
        safetensors.save_file(model.state_dict(), tmp_path / "weights")
        loaded = safetensors.load_file(tmp_path / "weights")
        assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
        assert agrees(model, through)
        assert is_packed(weights_of(model))


def test_unpacking_leaves_other_views_alone() -> None:
    model = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(2))
    flat = torch.randn(4, 4)
    for module, rows in zip(model, flat.split(2), strict=True):
        module.weight.data = rows
    npu_fuse.unpack(model)
    assert is_packed([module.weight for module in model])


def test_unpacking_knows_what_was_packed_only() -> None:
    pack(parameters(4, 2))
    model = nn.Linear(4, 2, bias=False)
    address = model.weight.data_ptr()
    npu_fuse.unpack(model)
    assert model.weight.data_ptr() == address
