"""Makes the examples importable, each as a module of its own name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))
