"""Capture once, replay right: graphs of a device, or their emulation on the host, behind a callable's own signature.

runner.py      GraphRunner, the five steps of a call;  holdings.py: the graphs and plans it has;  checks.py: refusals
spec.py        InputSpec: what is padded, with what;  buckets.py: to which sizes;  signature.py, keys.py: names, keys
buffers.py     fixed memory of inputs;  copies.py: how a call's arguments get there
record.py      what a run touches and writes, and what no replay could repeat
capture.py     the interface of capture backends;  host.py, device.py: those there are;  host_lists.py: host values
padding.py     whether rows may be padded, and what of the outputs is padding
outputs.py     what is handed out, and what a caller keeps
watch.py       memory that moved;  reach.py: what can be reached from a callable;  versions.py: dicts that were written
poison.py      memory that must not be read;  stats.py: counters
replayed.py    a graph of torch.compile's behind a runner;  numbers.py: what it counts on the host
"""

from .errors import CaptureError, PoisonError
from .runner import GraphRunner
from .spec import InputSpec

__all__ = ["CaptureError", "GraphRunner", "InputSpec", "PoisonError"]
