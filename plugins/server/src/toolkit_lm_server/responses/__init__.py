"""The routes of /v1/responses, as OpenAI has them, made of chat completions."""
