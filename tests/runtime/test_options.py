"""Options: unknown settings are caught early, with the known ones."""

import pytest

from npu_fuse import Options, Target


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


def test_a_target_may_be_named_by_its_soc() -> None:
    assert Options.of({"target": "ascend310p"}).target == Target("ascend310p")
    with pytest.raises(ValueError, match="unknown SoC 'ascend311p'"):
        Options(target="ascend311p")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give a Target or the name of an SoC, not 310"):
        Options(target=310)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["pack_weights", "strict", "keep_graphs", "profile_ranges"])
def test_a_switch_is_true_or_false(name: str) -> None:
    with pytest.raises(ValueError, match=f"Options.{name}: give True or False, not 'yes'"):
        Options.of({name: "yes"})


def test_graphs_are_settings() -> None:
    with pytest.raises(ValueError, match="give a dict of settings"):
        Options.of({"graphs": True})


def test_a_dump_goes_to_a_folder() -> None:
    with pytest.raises(ValueError, match="is a file, not a folder"):
        Options.of({"dump": __file__})
