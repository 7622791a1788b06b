"""DeviceConfig and AttentionConfig: the device of the model, and the attention backend of its
layers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from toolkit_lm.config.options import option


class DeviceConfig(Struct, frozen=True, kw_only=True):
    """The device and kernels of the model."""

    device: Annotated[
        str, option("Torch device: cpu, cuda, cuda:1, ... auto: cuda if there is one, else cpu.")
    ] = "auto"
    kernels: Annotated[
        str,
        option("Kernels of layers, by name. torch: plain torch. auto: the best for the device."),
    ] = "auto"


class AttentionConfig(Struct, frozen=True, kw_only=True):
    """The attention backend of the layers."""

    attention_backend: Annotated[
        str,
        option(
            "Attention backend by name, or names by kind of layer: decoder=A,window=B,encoder=C. "
            "auto: the best that can run each layer."
        ),
    ] = "auto"
