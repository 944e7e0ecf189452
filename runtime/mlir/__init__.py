"""Graphs as MLIR, by torch-mlir (the extra `mlir`), which is imported when it is asked for.

functional → importer → export, with ops as they are or lowered to linalg, which `jit` runs on the CPU; `hivm` asks the
compiler of AscendNPU-IR what it makes of an op.
"""
