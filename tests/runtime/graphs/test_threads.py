"""One runner and several threads: in turns, or not at all."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from npu_fuse import GraphRunner, InputSpec


def in_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_copies_are_right_in_any_number_of_threads():
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)).requires_grad_(False)
    runner = GraphRunner(model, buckets=[2, 4], inputs={"input": InputSpec("batch")}, outputs="clone")
    failures = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            x = torch.randn(int(torch.randint(1, 5, (), generator=generator)), 8, generator=generator)
            if not torch.allclose(runner(x), model(x), atol=1e-5):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert runner.stats.replays == 160


def test_views_belong_to_one_thread_until_they_are_gone():
    runner = GraphRunner(lambda x: x * 2)
    x = torch.ones(3)
    held = runner(x)
    with pytest.raises(RuntimeError, match="another thread still holds outputs"):
        in_thread(lambda: runner(x + 1))
    assert torch.equal(held, x * 2)
    del held
    assert torch.equal(in_thread(lambda: runner(x + 1)), x * 2 + 2)


def test_graphs_captured_in_one_thread_are_served_in_another():
    runner = GraphRunner(lambda x: x * 2, buckets=[2, 4], inputs={"x": InputSpec("n")})
    runner.capture({"x": torch.ones(4)}, progress=False)
    assert torch.equal(in_thread(lambda: runner(torch.ones(3))), torch.full((3,), 2.0))
    assert runner.stats.captures == 2
