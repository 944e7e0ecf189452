"""Entries of the cache as files: whole or not there, whoever writes at the same time."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config
from torch._guards import tracing
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .encoding import Unreadable

_SUFFIX = ".npu_fuse"


def folder_of(cache: bool | str | os.PathLike[str]) -> Path | None:
    """The folder that `Options.cache` means; None where nothing is kept.

    By default it lies beside torch's own caches, wherever TORCHINDUCTOR_CACHE_DIR puts these. What switches all of
    torch's caches off, `torch.compiler.config.force_disable_caches`, switches this one off too.
    """
    if cache is False or torch.compiler.config.force_disable_caches:
        return None
    return Path(cache_dir()) / "npu_fuse" if cache is True else Path(cache)


def pack(content: dict[str, Any]) -> bytes:
    """An entry as bytes: a digest of what follows, and what torch saves."""
    with unset_fake_temporarily(), tracing(None):
        buffer = io.BytesIO()
        torch.save(content, buffer)
    body = zlib.compress(buffer.getvalue(), level=1)  # a causal mask is four megabytes of two values
    return hashlib.sha256(body).digest() + body


def unpack(data: bytes) -> dict[str, Any]:
    """What `pack` took. Only tensors, numbers and text are read, no code.

    Raises:
        Unreadable: the bytes are not those that were written.
    """
    digest, body = data[:32], data[32:]
    if hashlib.sha256(body).digest() != digest:
        raise Unreadable("its bytes are not those that were written")
    with unset_fake_temporarily(), tracing(None):  # while something is traced, torch.load gives tensors without values
        try:
            content = torch.load(io.BytesIO(zlib.decompress(body)), weights_only=True)
        except Exception as error:  # a torch that writes otherwise
            raise Unreadable(f"torch can't load it: {error}") from error
    if not isinstance(content, dict):
        raise Unreadable("it is no entry")
    return content


def read(folder: Path, name: str) -> bytes | None:
    """The bytes of an entry; None where there is none."""
    try:
        return (folder / f"{name}{_SUFFIX}").read_bytes()
    except FileNotFoundError:
        return None


def write(folder: Path, name: str, data: bytes) -> None:
    """Puts an entry in place as a whole: who reads meanwhile gets the old one or the new one.

    Raises:
        OSError: the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name[:16]}_")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, folder / f"{name}{_SUFFIX}")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
