"""What holds for all tests."""

import gc
from collections.abc import Iterator

import pytest
from torch._functorch import config

# Compiling makes millions of small objects, hardly any of them in a cycle: looking for those less often saves time.
gc.set_threshold(200_000, 100, 100)


@pytest.fixture(scope="module")
def undeclared_aliases() -> Iterator[None]:
    """Ops may return what they were given without saying so: torch forbids it where the variable CI is set."""
    with config.patch(error_on_custom_op_aliasing=False):
        yield
