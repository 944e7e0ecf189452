"""Run time on a CPU: what is told of the rows, and what a call allocates at most."""

import torch

import run_time


def row(model: str, case: str, ratio: float) -> dict:
    shown = {"model": model, "case": case, "is_decoder": model != "encoder"}
    return {**shown, "time": {run_time.HEADLINE: ratio}, "memory": {run_time.HEADLINE: 2.0}}


def test_means_are_geometric_and_rows_with_errors_are_left_out() -> None:
    rows = [row("a", run_time.LONG_MASKED, 2.0), row("b", run_time.LONG_MASKED, 0.5), row("a", "decode", 8.0)]
    rows.append(row("encoder", run_time.LONG_MASKED, 1.0))
    told = run_time.summary([*rows, {"model": "b", "case": "decode", "error": "RuntimeError: no compiler"}])
    assert told["geometric mean"] == round(8 ** (1 / 4), 3)
    assert told["long masked prefill"] == 1.0  # an encoder has no prefill
    assert told["geometric mean by case"] == {run_time.LONG_MASKED: 1.0, "decode": 8.0}
    assert told["slowest"] == 0.5


def test_a_ratio_is_the_median_over_rounds() -> None:
    assert run_time._ratio([2.0, 30.0, 4.0], [1.0, 1.0, 4.0]) == 2.0


def test_the_peak_counts_what_lives_at_the_same_time() -> None:
    def call() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + 1
        del a
        return b * 2

    assert 8000 <= run_time._peak(call) < 9000  # two tensors, and the numbers that are added
