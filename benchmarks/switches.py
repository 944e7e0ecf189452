"""What a copy of the package with a switch at each check imports: one may be off, and it is told which refused where.

The variable NPU_FUSE_MUTANT is the number of the check that is off, also in processes that tests start; with none off,
NPU_FUSE_REACHED is a folder for the tests in which each check refused.
"""

import contextlib
import os
from collections.abc import Iterator

off = int(os.environ.get("NPU_FUSE_MUTANT", -1))
_folder = os.environ.get("NPU_FUSE_REACHED")
_told: set[tuple[int, str, str]] = set()


def is_on(check: int) -> bool:
    return check != off


def stands(check: int) -> bool:
    """For a statement that refuses."""
    _tell(check)
    return check != off


@contextlib.contextmanager
def noting(check: int) -> Iterator[None]:
    """For a note of a rounding, which refuses where only exact numerics are wanted."""
    with refusing(check):
        yield
    _tell(check, "noted")


def holds(check: int, value: object) -> bool:
    """For a condition that refuses by being true."""
    if value:
        _tell(check)
        return check != off
    return False


def fails(check: int, value: object) -> bool:
    """For one that refuses by not being true."""
    if value:
        return True
    _tell(check)
    return check == off


def reasons(check: int, given: Iterator[str]) -> Iterator[str]:
    if check != off:
        for reason in given:
            _tell(check)
            yield reason


@contextlib.contextmanager
def refusing(check: int) -> Iterator[None]:
    """For a call that refuses by raising."""
    try:
        yield
    except Exception:
        _tell(check)
        raise


def _tell(check: int, how: str = "refused") -> None:
    if _folder is None:
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if test and (check, how, test) not in _told:
        _told.add((check, how, test))
        with open(os.path.join(_folder, f"{os.getpid()}.txt"), "a") as file:
            file.write(f"{check}\t{how}\t{test}\n")
