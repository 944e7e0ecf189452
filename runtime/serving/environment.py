"""What the environment says to a plug-in: `NPU_FUSE=1` switches it on, `NPU_FUSE_OPTIONS` holds its settings.

Frameworks load the plug-ins of all installed packages in each of their processes: ours do nothing unless asked.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..options import Options
from ..target import Target

SWITCH = "NPU_FUSE"
SETTINGS = "NPU_FUSE_OPTIONS"

__all__ = ["SETTINGS", "SWITCH", "enabled", "options", "told"]

_log = logging.getLogger("npu_fuse")


def enabled() -> bool:
    """Whether `NPU_FUSE` is 1. Off, with one warning, where it is neither 1 nor 0, or the settings can't be read."""
    value = os.environ.get(SWITCH, "").strip()
    if value in ("", "0"):
        return False
    try:
        if value != "1":
            raise ValueError(f"{SWITCH}: give 1 or 0, not {value!r}")
        options()
    except ValueError as error:
        _log.warning("npu_fuse is off: %s", error)
        return False
    return True


def options() -> Options:
    """The settings in `NPU_FUSE_OPTIONS`: a JSON object by the names of `Options`; a target by its SoC.

        NPU_FUSE_OPTIONS='{"disable": ["qkv"], "target": "ascend910b"}'

    Raises:
        ValueError: it is no such object, or a setting is unknown.
    """
    text = os.environ.get(SETTINGS, "").strip()
    if not text:
        return Options()
    try:
        return Options.of(_settings(text))
    except (TypeError, ValueError) as error:  # a value of a wrong type is told by whatever meets it first
        raise ValueError(f"{SETTINGS}: {error}") from error


def told(settings: Options) -> str:
    """The settings that differ from the defaults, the same in every process."""
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    changed = {name: value for name, value in given.items() if value != getattr(Options(), name)}
    texts = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in changed.items()}
    return ", ".join(f"{name}={value!r}" for name, value in texts.items()) or "default options"


def _settings(text: str) -> Mapping[str, Any]:
    settings = json.loads(text)
    if not isinstance(settings, dict):
        raise ValueError(f'give a JSON object, such as {{"disable": ["qkv"]}}, not {text!r}')
    if isinstance(settings.get("target"), str):
        settings["target"] = Target(settings["target"])
    return settings
