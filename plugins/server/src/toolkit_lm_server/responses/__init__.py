"""POST /v1/responses, as OpenAI has it: made of chat completions."""
