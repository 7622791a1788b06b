"""Between users and the engine: prompts become requests in tokens, the engine's tokens become
outputs. Needs no torch."""
