"""Writes the support matrix from the contracts: `python docs/support_matrix.py`."""

from pathlib import Path

from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.target import SOCS

HERE = Path(__file__).resolve().parent
NPUS = [soc for soc in SOCS if soc != "host"]
HEAD = """# Which op exists where

Made from the contracts in `runtime/ops/` by `docs/support_matrix.py`. "Known from" is where a contract's facts were
read: a later release may allow more; npu_fuse goes by what is known. `npu-fuse ops NAME` tells of one op.
"""


def text() -> str:
    """The page."""
    lines = [HEAD, f"| op | {' | '.join(NPUS)} | writes | known from |", f"|---|{'---|' * len(NPUS)}---|---|"]
    for name, contract in sorted(CONTRACTS.items()):
        exists = " | ".join("✓" if soc in contract.socs else "" for soc in NPUS)
        lines.append(f"| `{name}` | {exists} | {', '.join(contract.mutates)} | {contract.source} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "support_matrix.md").write_text(text(), encoding="utf-8")
