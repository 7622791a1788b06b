"""Taps: hidden states of named layers of a model, kept for readers after the step is computed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm.model.fused import FusibleLayer
from toolkit_lm.model.kernels import FusedLayer
from toolkit_lm.model.layers import Layers
from toolkit_lm.model.parameters import torch_dtype

_SENT = "tapped/"
"""Prefix of a layer's name in the tensors that a pipeline stage passes on."""


class Taps:
    """A buffer [most tokens, H] for each tapped layer, at a fixed address. A step writes to its
    beginning. Layers without a tap are unchanged."""

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        config: VllmConfig,
        num_tokens: int,
        device: torch.device,
    ) -> None:
        """`names`: names of layers as in the checkpoint, "model.layers.3". The layers are on this
        rank, or on another pipeline stage. Raises ConfigError if no layer has the name."""
        layers = tappable(model)
        self.are_read = True
        """False: fused layers leave them out."""
        self.buffers: dict[str, Tensor] = {}
        self._received: list[str] = []
        for name in dict.fromkeys(names):
            if (layer := layers.get(name)) is None and name not in layers:
                near = difflib.get_close_matches(name, layers, 3, 0) or list(layers)[:3]
                raise ConfigError(
                    f"{type(model).__name__} has no layer {name!r} that can be tapped. The nearest "
                    f"are {', '.join(map(repr, near)) or 'none: it makes no layers that keep KV'}."
                )
            self.buffers[name] = torch.zeros(
                num_tokens,
                _hidden_size(config),
                dtype=torch_dtype(config.model.dtype),
                device=device,
            )
            if layer is None:
                self._received.append(name)
            else:
                self._tap(layer, self.buffers[name])

    def _tap(self, layer: nn.Module, buffer: Tensor) -> None:
        # An attribute of the layer, so that a compiled graph finds it in the model.
        layer.register_buffer("tapped", buffer, persistent=False)
        layer.register_forward_hook(_hook)
        if isinstance(layer, FusibleLayer) and layer.fused is not None:
            layer.fused = self._fused_and_tapped(layer.fused, buffer)

    def _fused_and_tapped(self, fused: FusedLayer, buffer: Tensor) -> FusedLayer:
        def call(*inputs: Any) -> tuple[Tensor, Any] | None:
            if (done := fused(*inputs)) is not None and self.are_read:
                write(*done, buffer)
            return done

        return call

    def sent(self, num_tokens: int) -> dict[str, Tensor]:
        """Tensors for the next pipeline stage, in addition to the model's own."""
        # Copies: the next step writes to the buffers while these are sent.
        return {_SENT + name: buffer[:num_tokens].clone() for name, buffer in self.buffers.items()}

    def receive(self, intermediate: dict[str, Tensor]) -> None:
        """Stores the tapped tensors that the previous stage has added."""
        for name, buffer in self.buffers.items():
            if (received := intermediate.pop(_SENT + name, None)) is not None and (
                name in self._received
            ):
                buffer[: len(received)] = received


def tappable(model: nn.Module) -> Mapping[str, nn.Module | None]:
    """Layers that compute a step's own tokens, by name; None: another pipeline stage has it.

    They are the layers of `make_layers`, and lists of layers that cache something of each token.
    Layers of an encoder next to a decoder see other tokens.
    """
    found: dict[str, nn.Module | None] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        for index, layer in enumerate(module):
            caches = any(
                isinstance(module, CacheLayer) and module.keeps is not None
                for module in layer.modules()
            )
            if isinstance(module, Layers):
                found[f"{path}.{index}"] = layer if layer in module.owned else None
            elif caches:
                found[f"{path}.{index}"] = layer
    return found


def _hidden_size(config: VllmConfig) -> int:
    sizes = config.hf_config.get("text_config") or config.hf_config
    return int(next(sizes[name] for name in ("hidden_size", "d_model", "n_embd") if name in sizes))


def _hook(layer: Any, arguments: Any, out: Any) -> None:
    # A layer returns x, or x and the residual that is still to be added to it.
    x, residual = out if isinstance(out, tuple) else (out, None)
    if torch.compiler.is_compiling():
        torch.ops.toolkit_lm.tap(x, residual, layer.tapped)
    else:
        write(x, residual, layer.tapped)


# Fused layers write their output themselves.
_hook.waits_for_call = False  # type: ignore[attr-defined]


def write(x: Tensor, residual: Tensor | None, buffer: Tensor) -> None:
    """Writes x [T, H], plus the residual, to the beginning of a buffer. The op
    `toolkit_lm::tap`."""
    rows = buffer[: len(x)]
    if residual is None:
        rows.copy_(x)
    else:
        torch.add(x, residual, out=rows)


_library: Any = torch.library.Library("toolkit_lm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("tap(Tensor x, Tensor? residual, Tensor(a!) buffer) -> ()")
_library.impl("tap", write, "CompositeExplicitAutograd")
torch.library.register_fake("toolkit_lm::tap", lambda x, residual, buffer: None, lib=_library)
