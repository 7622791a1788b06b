"""The files of an adapter: PEFT's folder of adapter_config.json and adapter_model.safetensors. This
module imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from toolkit_lm.errors import CheckpointError, in_plain_words
from toolkit_lm_weights.patterns import PatternError, ends, matches, parsed

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MOST_CONFIG = 16 << 20
"""Most bytes of adapter_config.json."""
_MOST_HEADER = 64 << 20
"""Most bytes of a safetensors header."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that change the base model's weights: the adapter fits no other ones."""
_LANGUAGE = re.compile(
    r"base_model\.model\.(?:model\.)?"
    r"(?:language_model\.|layers\.\d|norm\.|embed_tokens\.|lm_head\.)"
)
"""Names of tensors that belong to a language model, and to no encoder of media."""
_REFUSED = (
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
"""Fields that change what an adapter computes, and that are not supported if they are set."""

Names = list[str] | str | None


class AdapterConfig(Struct, kw_only=True):
    """The fields of adapter_config.json that matter here."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = field(default_factory=dict)
    alpha_pattern: dict[str, float] | None = field(default_factory=dict)
    target_modules: Names = None
    exclude_modules: Names = None
    target_parameters: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: Names = None
    modules_to_save: list[str] | None = None
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    init_lora_weights: bool | str | None = True
    alora_invocation_tokens: list[int] | None = None
    base_model_name_or_path: str | None = None

    def patterns(self) -> list[str]:
        """Regular expressions of the config."""
        single = [
            pattern
            for pattern in (self.target_modules, self.exclude_modules, self.layers_pattern)
            if isinstance(pattern, str)
        ]
        several = [self.rank_pattern or (), self.alpha_pattern or (), self.modules_to_save or ()]
        return single + [pattern for each in several for pattern in each]

    def rank(self, module: str) -> int:
        """Rank of a module's A and B: of the first pattern that its name ends with."""
        return int(_by_pattern(self.rank_pattern or {}, module, self.r))

    def scaling(self, module: str) -> float:
        """Factor of a module's B A."""
        rank = self.rank(module)
        alpha = float(_by_pattern(self.alpha_pattern or {}, module, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def first_token(self, token_ids: Sequence[int]) -> int | None:
        """Index of the first token of a prompt that the adapter changes: of an aLoRA, where its
        invocation tokens are for the last time. None: they are not there."""
        wanted = self.alora_invocation_tokens
        if not wanted:
            return 0
        size = len(wanted)
        starts = range(len(token_ids) - size, -1, -1)
        return next((at for at in starts if token_ids[at : at + size] == wanted), None)

    def targets(self, module: str) -> bool:
        """Whether the adapter has A and B for a module of that name. False where the config alone
        does not say."""
        if self.target_modules is None or self.target_modules == "all-linear":
            return False
        if self.exclude_modules and _matches(self.exclude_modules, module):
            return False
        starts = _starts(module)
        for name in self.modules_to_save or ():
            if any(module[end : end + 1] in ("", ".") for end in ends(name, module, starts)):
                return False
        if not _matches(self.target_modules, module):
            return False
        if self.layers_to_transform is None or isinstance(self.target_modules, str):
            return True
        wanted = self.layers_to_transform
        patterns = self.layers_pattern or [r"[^.]*"]
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            for start in starts:
                for end in sorted(ends(pattern, module, [start])):
                    if found := re.match(r"\.(\d+)\.", module[end:]):
                        return int(found[1]) in ([wanted] if isinstance(wanted, int) else wanted)
        return False


class TensorInfo(Struct):
    """Header of one tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class AdapterFolder:
    """A folder with an adapter. Its files are checked as far as they can be without the model."""

    def __init__(self, path: str | Path, most_bytes: int | None = None) -> None:
        """`most_bytes`: largest file of weights; None: any. Raises CheckpointError for a folder
        that holds no adapter that can be run."""
        self.path = Path(path)
        self._most_bytes = most_bytes
        if not self.path.is_dir():
            raise CheckpointError(f"adapter {str(path)!r}: there is no such folder.")
        self.config = self._read_config()
        self.tensors = self._read_header()
        """Headers of the tensors, by name."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of both files: the adapter's identity."""
        found = hashlib.sha256((self.path / CONFIG).read_bytes())
        with (self.path / WEIGHTS).open("rb") as file:
            while piece := file.read(1 << 22):
                found.update(piece)
        return found.hexdigest()

    @property
    def num_bytes(self) -> int:
        """Size of the weights' file."""
        return (self.path / WEIGHTS).stat().st_size

    @property
    def rank(self) -> int:
        """Greatest rank of a module."""
        return max([self.config.r, *(self.config.rank_pattern or {}).values()])

    @property
    def is_additive(self) -> bool:
        """Whether the adapter only adds B A x: it can be scaled, and run with others."""
        config = self.config
        return not (config.use_dora or self.replaces)

    @property
    def may_change_media(self) -> bool:
        """Whether the adapter may change what a model makes of pictures and sounds: a tensor's name
        is not one of a language model's."""
        return not all(map(_LANGUAGE.match, self.tensors))

    @property
    def replaces(self) -> bool:
        """Whether the adapter has parameters in place of the model's own."""
        config = self.config
        return bool(
            config.modules_to_save or config.bias != "none" or config.trainable_token_indices
        )

    def _read_config(self) -> AdapterConfig:
        path = self.path / CONFIG
        try:
            with path.open("rb") as file:
                contents = file.read(_MOST_CONFIG + 1)
        except OSError as error:
            raise CheckpointError(
                f"adapter {str(self.path)!r}: {CONFIG} cannot be read: {error.strerror}. An "
                f"adapter is a folder with {CONFIG} and {WEIGHTS}, as PEFT saves it."
            ) from error
        if len(contents) > _MOST_CONFIG:
            raise CheckpointError(f"{path} has more than {_MOST_CONFIG >> 20} MiB.")
        try:
            raw: dict[str, Any] = msgspec.json.decode(contents, type=dict)
            config = msgspec.convert(raw, AdapterConfig)
        except msgspec.ValidationError as error:
            raise CheckpointError(in_plain_words(error, f"{path}: ", "its contents")) from error
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{path} is not JSON: {error}.") from error
        if config.peft_type != "LORA":
            raise CheckpointError(f"{path}: peft_type is {config.peft_type!r}, not 'LORA'.")
        if config.r < 1 or any(r < 1 for r in (config.rank_pattern or {}).values()):
            raise CheckpointError(f"{path}: r and each rank of rank_pattern must be at least 1.")
        if config.bias not in ("none", "all", "lora_only"):
            raise CheckpointError(
                f"{path}: bias is {config.bias!r}, not 'none', 'all' or 'lora_only'."
            )
        is_more = bool(
            config.use_dora
            or config.modules_to_save
            or config.bias != "none"
            or config.trainable_token_indices
            or config.target_parameters
        )
        if config.alora_invocation_tokens and is_more:
            raise CheckpointError(
                f"{path}: alora_invocation_tokens are supported for A and B of linear layers "
                "alone, without use_dora, modules_to_save, bias, trainable_token_indices and "
                "target_parameters."
            )
        for pattern in config.patterns():
            try:
                parsed(pattern)
            except PatternError as error:
                raise CheckpointError(f"{path}: {pattern!r} is no pattern: {error}.") from error
        for name in _REFUSED:
            if raw.get(name):
                raise CheckpointError(f"{path}: {name} is set, which is not supported.")
        how = str(config.init_lora_weights).lower()
        if any(how.startswith(name) for name in _CHANGES_BASE):
            raise CheckpointError(
                f"{path}: init_lora_weights is {config.init_lora_weights!r}, which changed the "
                "base model's weights before the training. Convert the adapter with PEFT: "
                "model.save_pretrained(OUT, path_initial_model_for_weight_conversion=INITIAL), "
                "where INITIAL is the adapter as it was saved before the training."
            )
        return config

    def _read_header(self) -> dict[str, TensorInfo]:
        path = self.path / WEIGHTS
        if not path.is_file():
            pickled = self.path / "adapter_model.bin"
            why = (
                f"{pickled.name} is a pickle, which may run any code, and is not read. Load it "
                "with PEFT and save it anew, with model.save_pretrained(OUT)."
                if pickled.exists()
                else f"there is no {WEIGHTS}."
            )
            raise CheckpointError(f"adapter {str(self.path)!r}: {why}")
        size = path.stat().st_size
        if self._most_bytes is not None and size > self._most_bytes:
            raise CheckpointError(
                f"{path} has {size / 2**30:.3f} GiB, and the option max_file_gib of the plugin "
                f"lora is {self._most_bytes / 2**30:g}."
            )
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, _MOST_HEADER):
                raise CheckpointError(f"{path} is cut off, or no safetensors file.")
            header = file.read(length)
        try:
            found: dict[str, Any] = json.loads(header)
            found.pop("__metadata__", None)
            tensors = msgspec.convert(found, dict[str, TensorInfo])
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: its header is not that of safetensors.") from error
        if any(8 + length + info.data_offsets[1] > size for info in tensors.values()):
            raise CheckpointError(f"{path} is cut off: it has {size} bytes.")
        if not tensors:
            raise CheckpointError(f"{path} has no tensors.")
        if self.config.alora_invocation_tokens:
            for name in tensors:
                if "lora_embedding" in name:
                    raise CheckpointError(
                        f"{path}: tensor {name!r}: an adapter with alora_invocation_tokens changes "
                        "no embedding."
                    )
        return tensors


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        if len(module) in ends(pattern, module, _starts(module)):
            return value
    return default


def _matches(names: list[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return matches(names, module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _starts(module: str) -> list[int]:
    """Positions at which the parts of a module's name begin."""
    return [0, *(at + 1 for at, character in enumerate(module) if character == ".")]
