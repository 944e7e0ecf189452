"""With poison on, what padding or unwritten memory gives to a result is found."""

import pytest
import torch

from npu_fuse import GraphRunner, InputSpec, PoisonError
from npu_fuse.runtime.graphs.host import HostBackend

ROWS = {"x": InputSpec("batch")}


def runner_of(function, spec=ROWS["x"]):
    return GraphRunner(function, buckets=[4], inputs={"x": spec}, check_padding=False, debug_poison=True)


def test_padding_that_reaches_an_output():
    runner = runner_of(lambda x: (x * 2, x.mean(0)))
    runner(torch.randn(4, 3))
    with pytest.raises(PoisonError, match="output 1 has nan though no input has"):
        runner(torch.randn(3, 3))


def test_padding_that_does_not():
    runner = runner_of(lambda x: (x * 2, x.softmax(-1)))
    for n in (4, 3, 1):
        x = torch.randn(n, 3)
        torch.testing.assert_close(runner(x)[0], x * 2)


def test_nan_of_the_inputs_is_theirs():
    runner = runner_of(lambda x: x * 2)
    x = torch.tensor([[1.0], [float("nan")]])
    torch.testing.assert_close(runner(x), x * 2, equal_nan=True)


def test_integers_are_padded_as_ever_unless_their_spec_says_otherwise():
    table = torch.randn(5, 2)

    def function(x):
        return table[x], x.amax()

    assert runner_of(function)(torch.tensor([1, 2]))[1] == 2
    with pytest.raises(IndexError):
        runner_of(function, InputSpec("batch", poison=99))(torch.tensor([1, 2]))


def test_memory_that_a_replay_does_not_write():
    class Idle(HostBackend):
        def capture(self, run, host_lists):
            captured = super().capture(run, host_lists)
            captured.graph.replay = lambda: None
            return captured

    for dtype, sentinel in ((torch.float32, "nan"), (torch.int64, "-9223372036854775808")):
        runner = GraphRunner(lambda x: x * 2, backend=Idle(), debug_poison=True)
        with pytest.raises(PoisonError, match=f"output 0 has {sentinel} though no input has"):
            runner(torch.ones(4, dtype=dtype))
