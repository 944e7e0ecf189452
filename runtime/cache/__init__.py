"""Compilations kept across processes: a second start takes a graph's fusions from a file."""

from .entry import cached
from .files import folder_of

__all__ = ["cached", "folder_of"]
