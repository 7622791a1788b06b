"""The backend against the formula, in all that it does not refuse."""

from __future__ import annotations

from acme_lm_padded.backend import PaddedBackend
from toolkit_lm_devkit import AttentionBackendConformance


class TestPadded(AttentionBackendConformance):
    backend = PaddedBackend
