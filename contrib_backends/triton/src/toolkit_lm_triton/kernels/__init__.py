"""The kernels: only this package imports Triton, and only when a kernel is first needed."""
