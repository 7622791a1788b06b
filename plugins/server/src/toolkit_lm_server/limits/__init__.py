"""Limits against abuse: how much one client may make the server hold, compute or wait for.

Each module has one kind of limit: `connections`, `json_size`, `key_limits`. `route` bounds the size
of bodies where it reads them. The memory of requests, and turns between clients, are limits of any
server. They are in toolkit_lm_serving: `cost`, `budget`, `fairness`.
"""
