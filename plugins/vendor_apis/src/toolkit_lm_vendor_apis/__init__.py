"""The HTTP APIs of other vendors, each a plugin: `anthropic`, `cohere`, `ollama`. They are made of
the server's own."""
