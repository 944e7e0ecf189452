"""Stand-ins for the CANN libraries, so that torch_npu imports on a machine that has neither CANN nor an NPU.

    python cann_stub.py DIRECTORY
    CANN_STUB_DEVICES=1 LD_LIBRARY_PATH=DIRECTORY python -c "import torch_npu"

The libraries and symbols that the installed torch_npu wants are read from its shared objects with ``readelf``. One
small library, ``cann_stub.c`` and a stub for each symbol which that file lacks, is compiled with ``gcc``; a link to it
stands for each missing library. No kernel exists, so nothing is ever computed on the "device": it is there for
schemas, meta kernels and fake tensors, which need a device that can be set up.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

BODIES = Path(__file__).with_suffix(".c")

# CANN's C entry points, its bounded string functions, and its C++ namespaces.
CANN_SYMBOL = re.compile(r"(acl|rt[A-Z]|Hccl|Msprof)\w+|\w+_s|_ZN?K?2ge\w+|_Z\w*3atb\w+")

# Entry points that return nothing but a status, and may say "done" as there is nothing to do. All others fail.
SUCCEEDS = re.compile(
    r"acl(Init|Finalize|AppLog|GetRecentErrMsg|SetCompileopt)"
    r"|aclrt(CtxSet|Destroy|Record|Reset|Set|StreamWait|Synchronize)\w+"
    r"|aclmdl\w+Dump|Msprof\w+"
)

# Looked up by name at run time while a device is set up, so the imports don't show them.
LOOKED_UP = (
    "aclSetCompileopt",
    "aclrtCtxSetSysParamOpt",
    "aclrtDestroyStreamForce",
    "aclrtSetDeviceSatMode",
    "aclrtSetOpExecuteTimeOut",
    "aclrtSetStreamOverflowSwitch",
)


def package_folder(name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"cann_stub: {name} is not installed for {sys.executable}")
    return Path(spec.submodule_search_locations[0])


def missing(wheel: Path, provided: set[str]) -> tuple[set[str], set[str]]:
    """Return the CANN libraries and symbols that a folder of shared objects wants and nothing provides.

    Args:
        wheel: folder searched for shared objects.
        provided: file names of libraries that are found elsewhere.
    """
    objects = sorted(wheel.rglob("*.so"))
    listing = subprocess.run(
        ["readelf", "--wide", "--dynamic", "--dyn-syms", *objects],
        env=os.environ | {"LC_ALL": "C"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    # Libraries of the system carry a version ("libc.so.6"), those of CANN don't.
    libraries = set(re.findall(r"\(NEEDED\).*\[(\S+\.so)\]", listing))
    symbols = re.findall(r" GLOBAL +\w+ +(\w+) (\w+)$", listing, re.MULTILINE)
    defined = {name for section, name in symbols if section != "UND"}
    wanted = {name for section, name in symbols if section == "UND" and CANN_SYMBOL.fullmatch(name)}
    return libraries - provided - {file.name for file in objects}, wanted - defined


def source(symbols: set[str]) -> str:
    """Return the C source that defines all of ``symbols``."""
    bodies = BODIES.read_text()
    written = set(re.findall(r"^[\w ]+[ *](\w+)\(", bodies, re.MULTILINE))

    def result(name: str) -> str:
        if name.startswith("_Z"):
            return f'unsupported("{name}")'
        return "OK" if SUCCEEDS.fullmatch(name) else "NO_DRIVER"

    stubs = [f'STUB({i}, "{name}", {result(name)})\n' for i, name in enumerate(sorted(symbols - written))]
    return bodies + "".join(stubs)


def build(folder: Path) -> None:
    """Write the stub libraries for the installed torch_npu into a folder."""
    torch_libraries = {file.name for file in (package_folder("torch") / "lib").iterdir()}
    libraries, symbols = missing(package_folder("torch_npu"), torch_libraries)
    folder.mkdir(parents=True, exist_ok=True)
    stub = folder / "libcann_stub.so"
    subprocess.run(
        ["gcc", "-w", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{stub.name}", "-o", stub, "-x", "c", "-"],
        input=source(symbols.union(LOOKED_UP)),
        check=True,
        text=True,
    )
    for name in libraries:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(stub.name)
    print(f"{folder}: {len(libraries)} CANN libraries, {len(symbols)} symbols")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
