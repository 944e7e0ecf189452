"""What tests of graphs share: tiny modules whose numbers tell rows apart."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny ops are faster so
    yield
    torch.set_num_threads(threads)
