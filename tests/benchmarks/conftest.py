"""Makes the modules of the benchmarks importable, each by its own name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
