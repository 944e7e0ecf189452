"""Each framework has its tests, which run where it is installed: `make test-serving` has an environment for them."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # what tests of frameworks share

collect_ignore_glob = [f"test_{name}*.py" for name in ("sglang", "vllm") if find_spec(name) is None]
