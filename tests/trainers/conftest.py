"""Trainers of other people's import `vllm`: it is toolkit_lm_vllm here."""

from __future__ import annotations

import toolkit_lm_vllm

# Before anything imports TRL, which looks for vLLM when it is imported.
toolkit_lm_vllm.install()
