"""What exists when a compiled program runs: op contracts, the target they are judged for, and the backend."""
