"""AttentionConfig: which attention backend runs the layers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from toolkit_lm.config.options import option


class AttentionConfig(Struct, frozen=True, kw_only=True):
    """Which attention backend runs the layers."""

    attention_backend: Annotated[
        str,
        option(
            "Attention backend by name, or names by kind of layer: decoder=A,window=B,encoder=C. "
            "auto: for each layer the best that can run it."
        ),
    ] = "auto"
