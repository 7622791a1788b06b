"""A library for servers of an engine, without a web framework.

`cost` and `budget` bound the memory of requests. `engine` is an engine as routes get it. `fairness`
has turns between clients.
"""

CLIENT = "client"
"""The key of the client's name in a request's context."""
ADAPTERS = "adapters"
"""The key, in a request's context, of patterns of the names of adapters that its client may use, a
line each. Absent: all."""
ADAPTER = "lora.adapter"
"""The key, in a request's context, of the adapter that the request has as its model."""
