"""Whether any of many dicts was written to: one question, some nanoseconds for each dict.

CPython counts the writes to a dict, or tells them to who watches it; the guards of Dynamo know both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._C._dynamo.guards import RootGuardManager, dict_version
from torch._dynamo.guards import GuardManagerType


class Versions:
    """The versions that some dicts have now."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)
        self._versions = list(map(dict_version, self._dicts))
        self._guards: Any = RootGuardManager()
        for i, written in enumerate(self._dicts):
            kind = GuardManagerType.GUARD_MANAGER
            guards = self._guards.list_getitem_manager(key=i, source="", example_value=written, guard_manager_enum=kind)
            guards.add_dict_version_guard(written, ["its version"], None)

    def hold(self) -> bool:
        """Whether none was written to since."""
        return bool(self._guards.check(self._dicts))

    def written(self) -> list[bool]:
        """Which were."""
        return [version != now for version, now in zip(self._versions, map(dict_version, self._dicts), strict=True)]
