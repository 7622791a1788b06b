"""Cuts the tensors of an adapter to this rank's share of the layers that they change."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import HeadLinear, LinearBase, LinearMethod, LowRank
from torch import Tensor, nn

from toolkit_lm_lora.files import WEIGHTS, AdapterFolder
from toolkit_lm_lora.joining import Dora, Joining, Part, of_inputs, of_outputs, span
from toolkit_lm_lora.method import Change
from toolkit_lm_lora.modules import HIGH, LOW
from toolkit_lm_lora.names import Names, Place
from toolkit_lm_lora.row_order import RowOrder

_PREFIX = "base_model.model."
_SUFFIXES = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "token_adapter.trainable_tokens_delta",
    "base_layer.weight",
    "base_layer.bias",
    "weight",
    "bias",
)
_SUFFIX = re.compile(rf"(.*?)\.({'|'.join(map(re.escape, _SUFFIXES))})")


@dataclass
class Adapter:
    """An adapter's share on this rank."""

    digest: str
    changes: dict[str, Change]
    """By the prefix of a linear layer."""
    modules: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By the path of another module, its parameters in the place of the model's."""
    dora: dict[str, Dora] = field(default_factory=dict)
    """By the prefix of a layer with DoRA, until it is first used."""

    @property
    def num_bytes(self) -> int:
        own = sum(change.num_bytes for change in self.changes.values())
        return own + sum(t.nbytes for each in self.modules.values() for t in each.values())


class Reader:
    """Reads adapters for one rank's model."""

    def __init__(
        self, model: nn.Module, names: Names, *, is_first: bool, low_rank: LowRank | None = None
    ) -> None:
        """`is_first`: this rank adds what ranks that are summed up must add once. `low_rank`: what
        adds to the products of the layers' own methods."""
        self._low_rank = low_rank
        self._model = model
        self._names = names
        self._is_first = is_first
        self._paths = {id(module): path for path, module in model.named_modules()}
        # Layers are wrapped and unwrapped by steps, and an adapter is read meanwhile.
        self.methods: dict[str, LinearMethod] = {
            module.prefix: module.method
            for module in model.modules()
            if isinstance(module, LinearBase)
        }
        self.row_order = RowOrder(model, self.methods)

    def read(self, folder: AdapterFolder, max_rank: int) -> Adapter:
        """Raises CheckpointError for an adapter that does not fit the model, UnsupportedError for
        one that cannot be run."""
        if folder.rank > max_rank:
            raise UnsupportedError(
                f"adapter {str(folder.path)!r} has rank {folder.rank}, and the option max_rank of "
                f"the plugin lora is {max_rank}."
            )
        reading = Reading(
            self._model,
            self._names,
            self._paths,
            self.methods,
            folder,
            self._is_first,
            self.row_order,
        )
        reading.low_rank = self._low_rank
        return reading.read()


class Reading:
    """Reads one adapter."""

    def __init__(
        self,
        model: nn.Module,
        names: Names,
        paths: Mapping[int, str],
        methods: Mapping[str, LinearMethod],
        folder: AdapterFolder,
        is_first: bool,
        row_order: RowOrder | None = None,
    ) -> None:
        """`row_order`: None: all rows are in the checkpoint's order."""
        self._model: Any = model
        self._row_order = row_order
        self._names = names
        self._paths = paths
        self._methods = methods
        self._folder = folder
        self._config = folder.config
        self._is_first = is_first
        self.low_rank: LowRank | None = None
        self._of_modules: dict[str, dict[str, str]] = {}
        """By module and suffix, names of tensors."""
        self.parts: dict[str, dict[int | None, Part]] = {}
        """By layer and part."""
        self.layers: dict[str, LinearBase] = {}
        self.tokens: dict[str, tuple[Tensor, Tensor]] = {}
        self.adapter = Adapter(folder.digest, {})

    def read(self) -> Adapter:
        self.parse()
        for prefix, parts in self.parts.items():
            layer = self.layers[prefix]
            joining = Joining(
                layer,
                parts,
                self._model.kernels,
                self.tokens.get(prefix),
                method=self._methods.get(prefix),
                low_rank=self.low_rank,
            )
            self.adapter.changes[prefix] = joining.change()
            if joining.has_magnitudes:
                weight = self._weight(layer, prefix)
                self.adapter.dora[prefix] = joining.dora(weight, self._folder.path / WEIGHTS)
        return self.adapter

    def parse(self, *, keeps_all: bool = False) -> None:
        """Fills `parts`, `layers`, `tokens` and the adapter's modules.

        `keeps_all`: the model has no weights, so nothing is compared with them.
        """
        self._keeps_all = keeps_all
        for name in self._folder.tensors:
            found = _SUFFIX.fullmatch(name.removeprefix(_PREFIX))
            if found is None:
                raise self._error(name, "no tensor of LoRA has such a name")
            self._of_modules.setdefault(found[1], {})[found[2]] = name
        with safe_open(self._folder.path / WEIGHTS, framework="pt") as file:
            self._get: Callable[[str], Tensor] = file.get_tensor
            for module, tensors in self._of_modules.items():
                self._module(module, tensors)
        self._check_complete()

    def _error(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._folder.path / WEIGHTS}: tensor {name!r}: {why}.")

    def _expect(self, name: str, tensor: Tensor, shape: tuple[int, ...], subject: str) -> None:
        if tuple(tensor.shape) != shape:
            raise self._error(
                name, f"its shape is {list(tensor.shape)}, but {subject} needs {list(shape)}"
            )

    def _check_complete(self) -> None:
        adapted = {
            (place.layer.prefix, place.part)
            for module in self._of_modules
            if (place := self._names.place(module.removesuffix(".base_layer"))) is not None
        }
        for name in self._names.linear():
            place = self._names.place(name)
            assert place is not None
            spec = place.layer.spec
            fused = place.part is None and len(spec.sources) > 1
            if spec.kind == "experts" or fused or not self._config.targets(name):
                continue
            if (place.layer.prefix, place.part) not in adapted:
                raise CheckpointError(
                    f"{self._folder.path / WEIGHTS}: target_modules has the module {name!r}, and "
                    f"there is no tensor {_PREFIX}{name}.lora_A.weight."
                )

    def _module(self, module: str, tensors: dict[str, str]) -> None:
        names = self._names
        if self._config.target_parameters is not None or self._has_experts(module):
            bare = module.removesuffix(".base_layer")
            if (experts := names.experts_of(bare)) is not None:
                self._experts(module, tensors, experts, down=bare == module)
                return
        if (place := names.place(module)) is not None:
            self._layer(module, tensors, place)
        elif (other := names.module(module)) is not None:
            self._replaced(module, tensors, other)
        elif not names.is_elsewhere(module) and not self._is_unused(module):
            raise self._error(
                next(iter(tensors.values())),
                f"the model has no module {module!r}. The adapter was made for "
                f"{self._config.base_model_name_or_path or 'another model'}",
            )

    def _is_unused(self, module: str) -> bool:
        """Whether the model leaves a module of the checkpoint out, such as a pooler."""
        if self._names.is_unused(module):
            return True
        patterns = getattr(self._model, "ignored", ())
        return any(re.search(pattern, f"{module}.weight") for pattern in patterns)

    def _has_experts(self, module: str) -> bool:
        return self._names.place(module) is None and ".experts" in module

    def _layer(self, module: str, tensors: dict[str, str], place: Place) -> None:
        layer, part = place
        spec = layer.spec
        self.layers[layer.prefix] = layer
        ours = self.parts.setdefault(layer.prefix, {}).setdefault(part, Part())
        full = [spec.outputs[part]] if part is not None else [*spec.outputs]
        outputs = sum(shard.full for shard in full)
        get = self._get
        is_embedding = spec.kind == "embedding"
        self._pairs(module, tensors, place, ours)
        scaling = self._config.scaling(module)
        if (name := tensors.get("lora_B.bias")) is not None:
            shift = self._vector(name, outputs, module, place) * scaling
            ours.shift = self._once(shift, layer)
        for suffix in ("bias", "base_layer.bias"):
            if (name := tensors.get(suffix)) is not None:
                shift = self._vector(name, outputs, module, place)
                if layer.bias is None:
                    raise self._error(name, f"{module!r} has no bias")
                if self._keeps_all:
                    ours.replaces_bias = True
                else:
                    shift = shift - layer.bias.detach().float()[span(layer, part)]
                shift = self._once(shift, layer)
                ours.shift = shift if ours.shift is None else ours.shift + shift
        if (name := tensors.get("lora_magnitude_vector")) is not None:
            if is_embedding:
                raise UnsupportedError(f"{self._folder.path}: DoRA of the embedding {module!r}.")
            ours.magnitude = self._vector(name, outputs, module, place)
        if (name := tensors.get("base_layer.weight")) is not None and not self._keeps_all:
            self._same(name, module, outputs, place)
        if (name := tensors.get("weight")) is not None:
            if part is not None or not self._config.modules_to_save:
                raise self._error(name, "modules_to_save does not have it, or not the whole layer")
            weight = get(name)
            self._expect(name, weight, (outputs, spec.inputs.full), module)
            ours.weight = of_inputs(self._rows(weight, place), layer)
        if (name := tensors.get("token_adapter.trainable_tokens_delta")) is not None:
            self._trained_tokens(name, module, layer)

    def _pairs(self, module: str, tensors: dict[str, str], place: Place, ours: Part) -> None:
        """A and B of a layer or an embedding."""
        layer, part = place
        spec = layer.spec
        full = [spec.outputs[part]] if part is not None else [*spec.outputs]
        outputs = sum(shard.full for shard in full)
        get = self._get
        is_embedding = spec.kind == "embedding"
        pairs = ("lora_embedding_A", "lora_embedding_B"), ("lora_A.weight", "lora_B.weight")
        for low_name, high_name in pairs:
            names = [tensors.get(low_name), tensors.get(high_name)]
            if names == [None, None]:
                continue
            if None in names:
                missing = low_name if names[0] is None else high_name
                raise self._error(names[0] or names[1] or "", f"{module}.{missing} is missing")
            of_low, of_high = (name for name in names if name is not None)
            low = get(of_low)
            high = get(of_high)
            rank = self._config.rank(module)
            if low_name == "lora_embedding_A":
                if not is_embedding:
                    raise self._error(of_low, f"{module!r} is no embedding")
                size = spec.inputs.full
                self._expect(of_low, low, (rank, outputs), f"rank {rank} of {module}")
                self._expect(of_high, high, (size, rank), f"rank {rank} of {module}")
                ours.low = self._rows(low.T, place)
                ours.high = high * self._config.scaling(module)
                continue
            if is_embedding:
                raise self._error(of_low, f"{module!r} is an embedding")
            inputs = spec.inputs.full
            self._expect(of_low, low, (rank, inputs), f"rank {rank} of {module}")
            self._expect(of_high, high, (outputs, rank), f"rank {rank} of {module}")
            ours.low = of_inputs(low, layer)
            ours.high = self._rows(high.float() * self._config.scaling(module), place)

    def _vector(self, name: str, outputs: int, module: str, place: Place) -> Tensor:
        tensor = self._get(name).float()
        self._expect(name, tensor, (outputs,), module)
        return self._rows(tensor, place)

    def _rows(self, tensor: Tensor, place: Place) -> Tensor:
        """This rank's rows of a tensor [outputs, ...], in the order of the layer's own."""
        layer, part = place
        if self._row_order is not None and (order := self._row_order.of(layer, part)) is not None:
            return tensor[order]
        outputs = layer.spec.outputs
        return of_outputs(tensor, [*outputs] if part is None else [outputs[part]])

    def _same(
        self,
        name: str,
        module: str,
        outputs: int,
        place: Place,
    ) -> None:
        """Checks that a copy of the model's own weight is the model's."""
        layer, part = place
        full = [*layer.spec.outputs] if part is None else [layer.spec.outputs[part]]
        weight = self._get(name)
        self._expect(name, weight, (outputs, layer.spec.inputs.full), module)
        own = self._weight(layer, module)
        mine = own[span(layer, part)]
        copy = of_inputs(self._rows(weight, place), layer).to(mine.dtype)
        if len(full) == 1:
            # A vocabulary is padded.
            there = max(0, full[0].full - full[0].start)
            mine, copy = mine[:there], copy[:there]
        if not torch.equal(mine, copy.to(mine.device)):
            raise self._error(
                name, "it is another weight than the model's: the adapter fits another base"
            )

    def _weight(self, layer: LinearBase, module: str) -> Tensor:
        try:
            return self._methods[layer.prefix].dequantized()
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{self._folder.path}: {module!r} needs the layer's own weight: {error}."
            ) from error

    def _trained_tokens(self, name: str, module: str, layer: LinearBase) -> None:
        wanted = self._config.trainable_token_indices
        indices = wanted if isinstance(wanted, list) else None
        if isinstance(wanted, dict):
            indices = next(
                (
                    those
                    for key, those in wanted.items()
                    if module == key or module.endswith(f".{key}")
                ),
                None,
            )
        if indices is None:
            raise self._error(name, "trainable_token_indices does not have its module")
        size = layer.spec.inputs.full
        rows = self._get(name)
        self._expect(name, rows, (len(indices), size), f"{len(indices)} trained tokens")
        [shard] = layer.spec.outputs
        if not all(0 <= index < shard.full for index in indices):
            raise self._error(name, f"a token is not in the vocabulary of {shard.full}")
        at = torch.tensor(indices, dtype=torch.int64)
        self.tokens[layer.prefix] = at, rows
        self.layers[layer.prefix] = layer
        for head in self._model.modules():
            # A tied head has the same rows.
            if isinstance(head, LinearBase) and head.spec.tied_to is not None:
                self.layers[head.prefix] = head
                self.parts.setdefault(head.prefix, {}).setdefault(None, Part())
                self.tokens[head.prefix] = at, rows

    def _replaced(self, module: str, tensors: dict[str, str], other: nn.Module) -> None:
        """Parameters of a module other than a linear layer."""
        parameters = dict(other.named_parameters(recurse=False))
        path = self._paths[id(other)]
        names = tensors.get("lora_A.weight"), tensors.get("lora_B.weight")
        if (
            isinstance(other, HeadLinear | nn.Linear)
            and self._is_added(other)
            and None not in names
        ):
            low, high = (self._get(name or "").float() for name in names)
            rank = self._config.rank(module)
            subject = f"rank {rank} of {module}"
            self._expect(names[0] or "", low, (rank, other.in_features), subject)
            self._expect(names[1] or "", high, (other.out_features, rank), subject)
            added = {LOW: low, HIGH: high * self._config.scaling(module)}
            self.adapter.modules.setdefault(path, {}).update(
                (key, tensor.to(other.weight.device).contiguous()) for key, tensor in added.items()
            )
            tensors = {key: name for key, name in tensors.items() if name not in names}
        wanted = self._config.modules_to_save or self._config.bias == "all"
        for suffix, name in tensors.items():
            if suffix == "base_layer.weight" or (suffix == "weight" and not wanted):
                continue
            if (own := parameters.get(suffix)) is None or not wanted:
                raise self._error(name, f"{module!r} has no such parameter, or is not adapted")
            tensor = self._get(name)
            self._expect(name, tensor, tuple(own.shape), module)
            mine = tensor if self._keeps_all else tensor.to(own.device, own.dtype)
            if self._keeps_all or not torch.equal(mine, own.detach()):
                self.adapter.modules.setdefault(path, {})[suffix] = mine

    def _is_added(self, other: nn.Module) -> bool:
        """Whether A and B can be added to the outputs of a module other than our linear layers: a
        head, or a layer of a model that computes its sequences one after the other. Raises
        UnsupportedError."""
        if not isinstance(other, nn.Linear) or self._model.current_rows is None:
            return isinstance(other, HeadLinear)
        if self._config.alora_invocation_tokens:
            raise UnsupportedError(
                f"{self._folder.path}: alora_invocation_tokens, for a model that computes all "
                "tokens of a sequence in each step."
            )
        return True

    def _experts(
        self,
        module: str,
        tensors: dict[str, str],
        experts: Mapping[int, list[LinearBase]],
        *,
        down: bool,
    ) -> None:
        """A of all experts [E * rank, inputs] and B [outputs, rank * E], as PEFT has them for a
        parameter of three dimensions."""
        if unknown := tensors.keys() - {"lora_A.weight", "lora_B.weight"}:
            raise self._error(
                tensors[min(unknown)], "of experts only lora_A and lora_B are supported"
            )
        if len(tensors) < 2:
            raise self._error(next(iter(tensors.values())), "lora_A or lora_B is missing")
        of_low = tensors["lora_A.weight"]
        of_high = tensors["lora_B.weight"]
        low = self._get(of_low)
        high = self._get(of_high)
        first = next(iter(experts.values()))
        parent = self._model.get_submodule(first[0].prefix.rsplit(".", 2)[0])
        count = sum(name.isdigit() for name, _ in parent.named_children())
        if getattr(parent, "unit", None) is not None:
            raise UnsupportedError(
                f"{self._folder.path}: experts of {module!r}, whose gate is of another kind."
            )
        parameter = module.removesuffix(".base_layer")
        parameter += ".down_proj" if down else ".gate_up_proj"
        rank, left = divmod(len(low), count)
        known = {self._config.rank(parameter), self._config.rank(module)}
        if left or rank not in known:
            raise self._error(
                of_low, f"it has {len(low)} rows, not rank {min(known)} times {count} experts"
            )
        scaling = self._config.scaling(parameter)
        inputs = first[1 if down else 0].spec.inputs.full
        outputs = sum(shard.full for shard in first[1 if down else 0].spec.outputs)
        self._expect(of_low, low, (rank * count, inputs), module)
        self._expect(of_high, high, (outputs, rank * count), module)
        lows = low.view(count, rank, inputs)
        highs = high.float().reshape(outputs, rank, count) * scaling
        for index, layers in experts.items():
            layer = layers[1 if down else 0]
            self.layers[layer.prefix] = layer
            ours = self.parts.setdefault(layer.prefix, {}).setdefault(None, Part())
            ours.low = of_inputs(lows[index], layer)
            ours.high = of_outputs(highs[:, :, index], [*layer.spec.outputs])

    def _once(self, shift: Tensor, layer: LinearBase) -> Tensor:
        """Ranks that have a share of the inputs are summed up: one of them adds the shift."""
        inputs = layer.spec.inputs
        return shift if inputs.size == inputs.full or self._is_first else torch.zeros_like(shift)
