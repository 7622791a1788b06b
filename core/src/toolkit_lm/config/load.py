"""LoadConfig: where weights come from, and how they are held."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from toolkit_lm.config.options import option


class LoadConfig(Struct, frozen=True, kw_only=True):
    """Where weights come from, and how they are held."""

    load_format: Annotated[
        str,
        option(
            "Load format of the weights, by name. dummy: random numbers, for measurements. auto: "
            "the first that reads MODEL."
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        option(
            "Quantization of the weights, by name: the checkpoint's, or one that is made at "
            "load. auto: the checkpoint's, or none."
        ),
    ] = "auto"
