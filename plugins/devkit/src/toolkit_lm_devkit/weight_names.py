"""WeightNames: a model and its checkpoint call each weight by the same name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import LinearBase, Model
from toolkit_lm_weights.safetensors import CheckpointWeights
from torch import Tensor

from toolkit_lm_devkit.conformance import Conformance

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""The number of a layer or of an expert in a name."""
_STACKED = re.compile(r"\.\d+\.\w+$")
"""The part of an expert's name that a tensor of all experts lacks."""


def one_of_each_kind(names: Iterable[str]) -> list[str]:
    """A name of each kind: kinds are names that differ by numbers of layers and experts alone. The
    first kind gives its first name, the second kind its second, so that each layer has its turn."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("", name), []).append(name)
    return [alike[turn % len(alike)] for turn, alike in enumerate(kinds.values())]


class WeightNames(Conformance):
    """Tests that layers know the checkpoint's names of their weights, and that errors about weights
    name them."""

    def test_layers_know_what_the_checkpoint_calls_their_weights(
        self, subjects: Callable[[str], Any], variant: str
    ) -> None:
        """`LinearSpec.sources`, by which a quantization finds what a checkpoint says of a layer."""
        subject = subjects(variant)
        names = CheckpointWeights(subject.folder).names()
        modules = {name.rpartition(".")[0] for name in names}
        model = self.make_model(subject)
        for name, layer in model.named_modules():
            # The weight of an embedding may stand for that of a head.
            if isinstance(layer, LinearBase) and layer.spec.kind != "lm_head":
                sources = layer.spec.sources
                if layer.spec.kind == "experts":
                    # A checkpoint may hold all experts in one tensor: "a.experts.gate_up_proj".
                    known = {self._renamed(model, module) for module in modules}
                    if known.issuperset(_STACKED.sub("", source) for source in sources):
                        continue
                unknown = [source for source in sources if source not in modules]
                assert not unknown, f"{name}: the checkpoint has no {', '.join(unknown)}"

    def test_missing_weights_are_refused_by_name(self, first: Any) -> None:
        for name in one_of_each_kind(self.checked_weights(first)):
            kept = [
                (other, tensor)
                for other, tensor in CheckpointWeights(first.folder)
                if other != name
            ]
            self.assert_refused(first, kept, name)

    def test_unexpected_weights_are_refused_by_name(self, first: Any) -> None:
        weights = list(CheckpointWeights(first.folder))
        self.assert_refused(
            first, [*weights, ("of.nobody.weight", weights[0][1])], "of.nobody.weight"
        )

    def test_misshaped_weights_are_refused_by_name(self, first: Any) -> None:
        for name in one_of_each_kind(self.checked_weights(first)):
            grown = [
                (n, torch.cat([t, t[:1]]) if n == name else t)
                for n, t in CheckpointWeights(first.folder)
            ]
            self.assert_refused(first, grown, name)

    def checked_weights(self, subject: Any) -> Iterator[str]:
        """The checkpoint's tensors that the model does not state to pass over."""
        ignored = self.model_class(subject).ignored
        for name, _ in CheckpointWeights(subject.folder):
            if not any(re.search(pattern, name) for pattern in ignored):
                yield name

    def assert_refused(self, subject: Any, weights: list[tuple[str, Tensor]], name: str) -> None:
        """Loading raises CheckpointError, which names the tensor, or at least the module that it
        belongs to."""
        model = self.make_model(subject)
        renamed = self._renamed(model, name)
        with pytest.raises(CheckpointError) as caught:
            model.load_weights(weights)
        # A packed tensor is reported by its parts: "...self_attn.q_proj.weight" for
        # "...self_attn.qkv_proj.weight".
        module = renamed.rpartition(".")[0].rpartition(".")[0] or renamed
        assert module in str(caught.value), (
            f"the error about {name!r} does not name it: {caught.value}"
        )

    def _renamed(self, model: Model, name: str) -> str:
        for pattern, replacement in model.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def model_class(self, subject: Any) -> type[Model]:
        """Returns the class of the subject's model."""
        raise NotImplementedError

    def make_model(self, subject: Any, *, rank: int = 0, ranks: int = 1) -> Model:
        """Constructs the subject's model, without weights."""
        raise NotImplementedError
