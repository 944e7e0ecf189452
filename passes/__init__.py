"""What is done to a graph: one file a pass, in the order of `pipeline`."""
