"""The one version that every distribution of the workspace shares."""

__version__ = "0.2.0"
