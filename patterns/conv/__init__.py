"""The parts of the analysis of convolutions along time: columns, and how they are moved, weighted, kept and written."""
