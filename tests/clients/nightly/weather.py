"""The task of the agents: tiny-tools calls `get_weather` twice, and says what came of it."""

from __future__ import annotations

QUESTION = "What is the weather in Paris and in Tokyo?"
SKIES = {"Paris": {"sky": "sunny", "degrees": 21}, "Tokyo": {"sky": "snowy", "degrees": 3}}
ANSWER = "It is sunny in Paris, 21 degrees. It is snowy in Tokyo, 3 degrees."
ASKED = ["Paris", "Tokyo"]
NO_CALL = {"logit_bias": {"31": -100}}
"""Fields of a request whose answer begins with no `<`. A model of this size has learned no JSON but
that of calls: where it may write either, it calls."""
