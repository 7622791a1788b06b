"""`toolkit run-batch`: a file of requests in OpenAI's batch format, asked of a model in this
process or of a server."""
