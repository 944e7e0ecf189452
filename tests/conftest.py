"""What holds for all tests."""

import gc

# Compiling makes millions of small objects, hardly any of them in a cycle: looking for those less often saves time.
gc.set_threshold(200_000, 100, 100)
