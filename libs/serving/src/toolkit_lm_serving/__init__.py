"""What servers of an engine need, and no web framework: what requests may cost (`cost`,
`budget`), an engine as routes get it (`engine`), and turns between clients (`fairness`)."""

CLIENT = "client"
"""The key of a request's context that says whose it is."""
