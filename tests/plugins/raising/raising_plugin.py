"""Raises when it is imported."""

raise OSError("no such accelerator")
