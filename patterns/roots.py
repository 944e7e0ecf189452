"""Which ops a rule need be asked about: of any other, no call is the root of its kind.

It is told once for each op of a graph, so that a rule is asked about few nodes. Each of these admits whatever its rules
would, and more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from .attention import WHOLE_LAYERS
from .canonical import WAIT, has_rule
from .movement import COPIES, ROW_MAJOR_VIEWS, VIEWS
from .preserved import original
from .rope import ROOTS
from .slot_write import READERS
from .values import CASTS, name_of

aten = torch.ops.aten

# What a node calls.
Target = Callable[..., Any] | str


def combined(target: Target) -> bool:
    """Of what the algebra of terms knows, what neither casts nor moves."""
    return has_rule(target) and target not in CASTS and target not in VIEWS and target not in COPIES


def normed(target: Target) -> bool:
    """What may give a norm."""
    return has_rule(target) or target in ROW_MAJOR_VIEWS


def rotated(target: Target) -> bool:
    """What may give a rotation."""
    return target in ROOTS or target in CASTS


def rotated_or_item(target: Target) -> bool:
    """The same, or one of several results."""
    return rotated(target) or target is operator.getitem


def cast(target: Target) -> bool:
    return target in CASTS


def moved(target: Target) -> bool:
    """What may only move elements."""
    return target in VIEWS or target in COPIES or target is operator.getitem


def attended(target: Target) -> bool:
    """What may give attention: a call, one of its results, or a product of matrices."""
    return target is operator.getitem or original(target) in _ATTENTION or target in WHOLE_LAYERS


_ATTENTION = (aten.scaled_dot_product_attention.default, aten.matmul.default, aten.bmm.default)


def quantised(target: Target) -> bool:
    """A cast, or what torch_npu's quantisers give."""
    return target in CASTS or target is operator.getitem or name_of(target).startswith("npu.")


def chosen(target: Target) -> bool:
    """What may give the weights of experts: a choice, as it is, gathered, divided by its sum or scaled."""
    return target in _CHOICES


_CHOICES = frozenset({operator.getitem, aten.gather.default, aten.div.Tensor, aten.mul.Tensor})


def waited(target: Target) -> bool:
    """The wait for a collective."""
    return name_of(target) == WAIT


def summed(target: Target) -> bool:
    return target is aten.sum.dim_IntList


def written(target: Target) -> bool:
    """A write into slots of a cache."""
    return target in READERS
