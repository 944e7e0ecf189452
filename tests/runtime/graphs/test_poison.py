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
    with pytest.raises(PoisonError, match="output 1 has nan where the function gives a number"):
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
        with pytest.raises(PoisonError, match=f"output 0 has {sentinel} where the function gives a number"):
            runner(torch.ones(4, dtype=dtype))


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x.log(), torch.tensor([-1.0, 3.0])),
        (lambda x: x.clamp(-128, 127).to(torch.int8), torch.tensor([-200.0, 3.0])),
        (lambda x: x.to(torch.uint8), torch.tensor([0.0, 255.0])),
    ],
    ids=["nan", "int8", "uint8"],
)
def test_what_the_function_gives_itself_is_no_poison(function, x):
    runner = runner_of(function)
    for _ in range(2):
        torch.testing.assert_close(runner(x), function(x), equal_nan=True)


def test_poison_beside_nan_of_the_inputs():
    x = torch.randn(3, 2)
    x[0, 0] = torch.nan
    with pytest.raises(PoisonError):
        runner_of(lambda x: x - x.mean(0))(x)
