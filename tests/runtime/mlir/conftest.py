"""Makes the benchmark importable whose calls are tested here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
