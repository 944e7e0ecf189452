"""Several ranks: what is fused on each, that all decide alike, and that collectives stay what and where they are."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import two_ranks
from torch import fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import npu_fuse
from helpers import compiled
from npu_fuse.passes.effects import communicates, is_pure, regions

Tensor = torch.Tensor
HALF = {
    "npu::npu_fused_infer_attention_score": 1,
    "npu::npu_add_rms_norm": 1,
    "npu::npu_swiglu": 1,
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What each function gives on both ranks."""
    names = ("written_by_hand", "matmuls_that_are_added_up", "in_place", "dtensors")
    names += ("kept", "one_rank_may_not_move_its_weights", "one_rank_compiles_alone")
    results = two_ranks.on_two_ranks(two_ranks.all_of, *(getattr(two_ranks, name) for name in names))
    return {name: [rank[i] for rank in results] for i, name in enumerate(names)}


def test_each_rank_fuses_its_part(found: dict[str, list[Any]]) -> None:
    first, second = found["written_by_hand"]
    for rank in (first, second):
        assert rank["ops"] == {"sgl_kernel_npu::split_qkv_tp_rmsnorm_rope": 1, **HALF}
        assert list(rank["refused"]) == ["mm_all_reduce"]  # it is turned off
        assert rank["error"] < max(2 * rank["eager"], 2**-5)
    all_reduce, wait = "_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"
    before, after = first["collectives"]
    assert before == [all_reduce, wait] * 4
    assert after == ["sgl_kernel_npu.split_qkv_tp_rmsnorm_rope.default", *[all_reduce, wait] * 2]
    assert second["collectives"] == first["collectives"]


def test_a_matmul_and_the_sum_of_all_ranks_are_one_op(found: dict[str, list[Any]]) -> None:
    for rank in found["matmuls_that_are_added_up"]:
        qkv = "sgl_kernel_npu::split_qkv_tp_rmsnorm_rope"
        assert rank["ops"] == {qkv: 1, "npu::npu_mm_all_reduce_base": 2, **HALF}
        after = (qkv, "npu::npu_mm_all_reduce_base", "npu::npu_mm_all_reduce_base")
        assert rank["collectives"][1] == [f"{op.replace('::', '.')}.default" for op in after]
        assert rank["error"] < max(2 * rank["eager"], 2**-5)
        unknown = rank["unknown"]
        assert unknown["ops"] == {qkv: 1, **HALF}
        assert "not known to be on one machine (LOCAL_WORLD_SIZE)" in unknown["refused"]["mm_all_reduce"]


def test_what_ranks_fused_is_kept_and_agreed_on_again(found: dict[str, list[Any]]) -> None:
    for first, second in found["kept"]:
        assert (first["cache"], second["cache"]) == ("1 kept", "1 taken")
        assert first["ops"]["npu::npu_mm_all_reduce_base"] == 2
        assert second["collectives"] == first["collectives"]
        assert second["error"] == first["error"]


def test_collectives_in_place_stay_where_they_are(found: dict[str, list[Any]]) -> None:
    for rank in found["in_place"]:
        assert HALF.items() <= rank["ops"].items()
        assert rank["error"] < max(2 * rank["eager"], 2**-5)
        before, after = rank["collectives"]
        assert len(before) == 8
        assert after == before


def test_models_of_dtensors_are_fused_but_for_what_moves_weights(found: dict[str, list[Any]]) -> None:
    for rank in found["dtensors"]:
        assert rank["ops"] == {"npu::npu_rms_norm": 1, "npu::npu_add_rms_norm": 1}
        assert list(rank["refused"]) == ["glu", "mm_all_reduce"]
        assert "a weight of its projections is a DTensor" in rank["refused"]["glu"]
        assert rank["error"] < 2**-4
        assert rank["all"] >= 2


def test_what_one_rank_may_not_fuse_none_does(found: dict[str, list[Any]]) -> None:
    first, second = found["one_rank_may_not_move_its_weights"]
    assert (first["held"], second["held"]) == (False, True)
    for rank in (first, second):
        assert "sgl_kernel_npu::split_qkv_tp_rmsnorm_rope" not in rank["ops"]
        assert HALF.items() <= rank["ops"].items()  # without a collective, each decides for itself
        assert "the ranks decide differently, so that none fuses its collectives: rank 0 " in rank["refused"]["qkv"]
        assert "share their storage with something else" in rank["refused"]["qkv"]
        assert rank["error"] < max(2 * rank["eager"], 2**-5)
        assert [name for name in rank["collectives"][1] if "all_reduce" in name] == [
            "_c10d_functional.all_reduce.default"
        ] * 4
    assert first["refused"]["qkv"] == second["refused"]["qkv"]
    assert first["collectives"] == second["collectives"]


def test_a_rank_that_compiles_alone_is_told_so(found: dict[str, list[Any]]) -> None:
    alone, other = found["one_rank_compiles_alone"]
    assert other == "nothing"
    assert "RanksDisagreeError: rank 0 has compiled a graph whose collectives may be fused, and 0.5 s later" in alone
    assert "rank 1 has not: all ranks have to compile the same graphs" in alone


# Collectives, on one rank of a group that is only played --------------------------------------------------------------


@pytest.fixture
def played() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def norm(x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, (8,), torch.ones(8, device=x.device))


@pytest.mark.usefixtures("played")
def test_collectives_are_never_dropped_joined_or_reordered() -> None:
    def model(x: Tensor) -> Tensor:
        first = norm(fc.all_reduce(x, "sum", "0"))
        again = norm(fc.all_reduce(x, "sum", "0"))
        fc.all_reduce(first + 1, "max", "0")  # of no use here, but another rank waits for it
        return norm(fc.all_gather_tensor(again, 0, "0")) + norm(fc.broadcast(first, 0, "0")).sum()

    result = compiled(model, torch.randn(4, 8))
    before, after = ([n for n in g.graph.nodes if communicates(n)] for g in (result.before, result.after))
    assert [str(node.target) for node in after] == [str(node.target) for node in before]
    assert len([node for node in after if "all_reduce" in str(node.target)]) == 3
    assert result.report.ops["npu::npu_rms_norm"] == 4
    assert not any(map(is_pure, after))


def test_pure_nodes_may_pass_a_collective_that_writes_nothing() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    functional = torch.ops._c10d_functional
    begun = graph.call_function(functional.all_reduce.default, (x, "sum", "0"))
    summed = graph.call_function(functional.wait_tensor.default, (begun,))
    behind = graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    written = graph.call_function(functional.all_reduce_.default, (x, "sum", "0"))
    received = graph.call_function(functional.irecv.default, (x, 1, 0, "0"))
    last = graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    numbered = regions(graph)
    assert numbered[x] == numbered[summed] == numbered[behind] == 0
    assert [numbered[node] for node in (written, received, last)] == [1, 3, 4]


@pytest.mark.usefixtures("played")
def test_a_buffer_that_is_being_sent_is_not_written() -> None:
    def model(x: Tensor, cache: Tensor, at: Tensor, waits: bool) -> Tensor:
        sent = torch.ops._c10d_functional.all_gather_into_tensor(cache, 2, "0")
        if waits:
            sent = torch.ops._c10d_functional.wait_tensor(sent)
        cache.index_copy_(0, at, x)
        return sent if waits else torch.ops._c10d_functional.wait_tensor(sent)

    for waits in (True, False):
        given = torch.randn(1, 8), torch.randn(4, 8), torch.tensor([2]), waits
        sites = [site for site in compiled(model, *given).report.sites if site.kind == "in_place"]
        assert [site.status for site in sites] == ["lowered" if waits else "refused"]
        assert waits or sites[0].reason == "a collective that reads the buffer may still be under way"


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("share", "reduce_op", "is_mean"), [(8, "sum", True), (16, "sum", False), (4, "avg", True), (8, "avg", False)]
)
def test_a_norm_over_ranks_has_the_mean_of_all(share: int, reduce_op: str, is_mean: bool) -> None:
    def model(x: Tensor) -> Tensor:
        total = fc.all_reduce(x.pow(2).sum(-1, keepdim=True), reduce_op, "0")
        return x * torch.rsqrt(total / share + 1e-6)

    report = compiled(model, torch.randn(3, 4)).report
    kinds = [(site.kind, site.status) for site in report.sites]
    assert kinds == [("tp_rms_norm", "refused" if is_mean else "missed")]
    if is_mean:
        assert (report.sites[0].params["ranks"], report.sites[0].params["hidden_size"]) == (2, 4)
        assert "a prologue of attention alone" in report.sites[0].reason
    else:
        assert "is no mean of them" in report.sites[0].reason
    assert not report.ops


def test_a_plain_norm_asks_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> None:
        raise AssertionError("nothing is to be asked")

    monkeypatch.setattr(npu_fuse.runtime.ranks, "disagreement", ask)
    assert compiled(norm, torch.randn(4, 8)).report.ops["npu::npu_rms_norm"] == 1
