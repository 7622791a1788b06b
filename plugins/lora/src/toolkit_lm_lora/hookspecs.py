"""The hook that this plugin brings, and the registry that it fills."""

from __future__ import annotations

from toolkit_lm.plugin import hookspec

from toolkit_lm_lora.resolvers import AdapterResolverRegistry


@hookspec
def toolkit_register_adapter_resolvers(resolvers: AdapterResolverRegistry) -> None:
    """Registers adapter resolvers: what finds adapters that requests name and that are not
    registered.

    Caller: the loader. Process: every one, though only the front resolves. Thread: main. Return:
    nothing; all implementations are called.
    """


REGISTRIES = {"toolkit_register_adapter_resolvers": AdapterResolverRegistry}
"""Registry that the loader fills for each hook."""
