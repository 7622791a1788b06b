"""The one version that every distribution of the workspace shares."""

__version__ = "0.1.0"
