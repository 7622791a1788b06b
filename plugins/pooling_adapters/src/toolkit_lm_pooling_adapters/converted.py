"""Base of all adapters: a subclass of a language model's class without its head, which takes the
checkpoint's names unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import Absent, Model, ParallelLMHead
from toolkit_lm.pooling import Pooler
from torch import Tensor, nn

_HEAD_NAMES = ("lm_head", "embed_out", "output")
"""Usual names of heads that are plain linear layers."""
_PART = "language_model"
"""Name of the decoder in models that see or hear: a Model, which loads its weights itself."""
_OF_DECODER = re.compile(rf"^(model\.{_PART}\.|{_PART}\.model\.|{_PART}\.|model\.)")
SCORE = "score."
"""Prefix of the names of a classifier's weights."""


class Converted(Model):
    """Mixed into the class of a language model: its head is gone, and `pooler` takes its place."""

    original: ClassVar[type[Model]]
    """The language model's class."""
    pooler: Pooler

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _check_direction(self, self.original.__name__)
        self.is_composed = isinstance(getattr(self, _PART, None), Model)
        """The decoder is a part, beside an encoder of media."""
        self.head_name = _find_head(self, self.original.__name__)
        self.has_head = not isinstance(self.get_submodule(self.head_name), Absent)
        """False on all ranks of a pipeline but the last, which pools."""
        self.head_weights = frozenset(
            self._key(name) for name in _names_of_head(self, self.head_name)
        )
        self.head_has_bias = getattr(self.get_submodule(self.head_name), "bias", None) is not None
        owner, _, name = self.head_name.rpartition(".")
        setattr(self.get_submodule(owner), name, Absent())

    # A pooling model gives no logits of tokens.
    compute_logits = Model.compute_logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(self._body(weights))

    def load_head(self, name: str, tensor: Tensor) -> None:
        """Is shown the head's tensors ("weight", "bias"), or a tied embedding as "weight", while
        the weights are loaded."""

    def load_score(self, name: str, tensor: Tensor) -> None:
        """Is shown the tensors of a trained classifier ("weight", "bias"), while the weights are
        loaded."""

    def _body(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights of all but head and classifier, under the names that the language model's
        class knows."""
        head = self._key(f"{self.head_name}.")
        tied = next((name for name in self.head_weights if not name.startswith(head)), None)
        stand_in = None
        embedding = None
        seen = set()
        for stored, tensor in weights:
            if stored.startswith(SCORE):
                self.load_score(stored.removeprefix(SCORE), tensor)
                continue
            name = self._full_name(stored)
            final = self._key(self._renamed(name))
            seen.add(final)
            if final == tied:
                embedding = tensor
            if not final.startswith(head):
                yield name, tensor
                continue
            self.load_head(final.removeprefix(head), tensor)
            if final in self.head_weights:
                stand_in = tensor
        if embedding is not None and f"{head}weight" not in seen:
            self.load_head("weight", embedding)
        if tied is not None and tied not in seen and stand_in is not None:
            # The checkpoint holds only the head of a tied pair.
            yield f"model.{_PART}.{tied}" if self.is_composed else tied, stand_in

    def _full_name(self, name: str) -> str:
        """A checkpoint of the decoder alone lacks the decoder's own name: "layers.0..." is
        "model.layers.0..."."""
        if self.is_composed:
            lacks = re.match(rf"{_PART}\.(?!model\.|lm_head\.)", name)
            return f"model.{name}" if lacks else name
        first = name.partition(".")[0]
        children = dict(self.named_children())
        owners = [
            owner for owner, child in children.items() if first in dict(child.named_children())
        ]
        return name if first in children or len(owners) != 1 else f"{owners[0]}.{name}"

    def _key(self, name: str) -> str:
        """A name without the decoder's, by which the checkpoint's names and the model's compare."""
        return _OF_DECODER.sub("", name) if self.is_composed else name

    def _renamed(self, name: str) -> str:
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name


ConvertedT = TypeVar("ConvertedT", bound=Converted)


def subclass(
    kind: type[ConvertedT], model_class: type[Model], suffix: str, **attributes: Any
) -> type[Model]:
    """The class of `model_class`'s models with `kind` mixed in; `model_class` stays as it is."""
    name = f"{model_class.__name__}{suffix}"
    doc = f"{model_class.__name__}, by the pooling adapter `{kind.__name__}`."
    return type(
        name,
        (kind, model_class),
        {
            "__module__": model_class.__module__,
            "__doc__": doc,
            "original": model_class,
            **attributes,
        },
    )


def is_pooling_model(model_class: type[Model], vllm_config: VllmConfig) -> bool:
    """Whether a class is that of a pooling model already.

    Raises UnsupportedError for one that is neither that nor a language model.
    """
    if issubclass(model_class, Converted):
        return True
    if model_class.compute_logits is not Model.compute_logits:
        return False
    with torch.device("meta"):
        model = model_class(vllm_config=vllm_config)
    if not isinstance(getattr(model, "pooler", None), Pooler):
        raise _refusal(model_class.__name__, "it gives neither logits nor pooled vectors")
    return True


def _find_head(model: Model, name: str) -> str:
    """Name of the head in `model`, whose class is called `name`. On a pipeline rank without a head:
    the name of its stand-in."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for found, module in modules.items():
        if isinstance(module, ParallelLMHead):
            return found
    for found in _HEAD_NAMES:
        if isinstance(modules.get(found), nn.Linear | Absent):
            return found
    raise _refusal(name, "it has no language-modeling head (lm_head)")


def _check_direction(model: Model, name: str) -> None:
    """Raises UnsupportedError where config.json asks for bidirectional attention, and the model
    looks back only."""
    hf_config = model.vllm_config.hf_config
    asked = [
        key
        for key, off in (("is_causal", True), ("use_bidirectional_attention", False))
        if hf_config.get(key, off) not in (off, None)
    ]
    layers = (module for module in model.modules() if isinstance(module, CacheLayer))
    if asked and any(layer.one_way for layer in layers):
        raise _refusal(
            name,
            f"config.json's {asked[0]!r} asks for bidirectional attention, which this class does "
            "not have",
        )


def _names_of_head(model: Model, head: str) -> frozenset[str]:
    """The names of the head's weight: with a tied embedding, the embedding's too."""
    weight = getattr(model.get_submodule(head), "weight", None)
    return frozenset(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is weight
    )


def _refusal(name: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} cannot be converted into a pooling model: {reason}. Supported: decoder-only "
        "language models."
    )
