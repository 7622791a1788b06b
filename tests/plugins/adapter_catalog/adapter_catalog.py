"""An adapter resolver that reads a catalog: a file with a name and a folder in each line."""

from __future__ import annotations

from msgspec import Struct
from toolkit_lm.plugin import hookimpl
from toolkit_lm_lora.resolvers import AdapterResolverRegistry


class Options(Struct, frozen=True):
    """`--plugin-option adapter_catalog.NAME=...`"""

    file: str = ""
    """The catalog."""


@hookimpl
def toolkit_register_adapter_resolvers(resolvers: AdapterResolverRegistry) -> None:
    resolvers.add("catalog", "adapter_catalog_resolver:CatalogResolver")
