"""`python -m npu_fuse`, the same as the command `npu-fuse`."""

import sys

from .runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())
