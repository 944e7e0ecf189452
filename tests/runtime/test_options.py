"""Options: unknown settings are caught early, with the known ones."""

import pytest

from npu_fuse import Options


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'rms_nrom' \(did you mean 'rms_norm'\?\); known: rms_norm, "):
        Options(disable=frozenset({"rms_nrom"}))


def test_a_string_is_no_set_of_kinds() -> None:
    with pytest.raises(ValueError, match=r"give a set of kinds, such as \{'qkv'\}"):
        Options(disable="qkv")  # type: ignore[arg-type]  # what a user might write


def test_an_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown option 'fuse'; known: disable, numerics"):
        Options.of({"fuse": True})


def test_any_collection_of_kinds_will_do() -> None:
    assert Options.of({"disable": ["qkv", "rope"]}).disable == frozenset({"qkv", "rope"})


def test_an_unknown_policy_of_numerics_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Options\.numerics: 'fast' is unknown; known: fused, exact"):
        Options(numerics="fast")  # type: ignore[arg-type]  # what a user might write
