"""The modules of sentence-transformers: what each one's config.json says, in the forms of all its
versions."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import Struct, field
from toolkit_lm.errors import CheckpointError, nearest
from toolkit_lm_poolers.details import (
    ACTIVATIONS,
    Dense,
    Head,
    LayerNorm,
    LogitScore,
    Normalize,
    Pooling,
    Splade,
)

from toolkit_lm_sentence_transformers.json_file import JsonObject, choose

Level = Literal["sentence", "token"]
_LEVELS: dict[str, Level] = {"sentence_embedding": "sentence", "token_embeddings": "token"}

MODES = {
    "cls": "CLS",
    "max": "MAX",
    "mean": "MEAN",
    "mean_sqrt_len_tokens": "MEAN_SQRT_LEN",
    "weightedmean": "WEIGHTED_MEAN",
    "lasttoken": "LAST",
}
"""The names of pooling modes since version 5.4, and ours."""
OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The keys before version 5.4, in the order in which their vectors are concatenated."""

_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_TASKS = {
    "feature-extraction": ("token_embeddings", "last_hidden_state"),
    "sequence-classification": ("scores", "logits"),
    "text-generation": ("causal_logits", "logits"),
    "fill-mask": ("token_embeddings", "logits"),
}
"""Output's name in sentence-transformers, and the same output's name in transformers, by task."""
_TRANSFORMERS = {"Transformer": "feature-extraction", "MLMTransformer": "fill-mask"}
"""Default task of each class of transformers."""
_HARMLESS = (
    "torch_dtype",
    "dtype",
    "attn_implementation",
    "trust_remote_code",
    "revision",
    "add_pooling_layer",
    "use_fast",
    "device_map",
)
"""Arguments of the transformer that do not change what it computes, or that are decided
elsewhere."""


class QueryExpansion(Struct, frozen=True, kw_only=True):
    """How a late-interaction model fills up short queries."""

    length: int
    """Tokens of a filled-up query, special tokens included."""
    strategy: Literal["fixed", "min"] = "fixed"
    """fixed: longer queries are truncated to `length`. min: they are not."""
    attend: bool = False
    """The model's attention sees the tokens that are filled in."""
    token: str | None = None
    """Token that pads queries. None: the tokenizer's mask token."""


class Transformer(Struct, frozen=True, kw_only=True):
    """The model itself, and how its input is prepared."""

    path: str = ""
    """Folder of the transformer, relative to the checkpoint's."""
    max_seq_length: int | None = None
    do_lower_case: bool = False
    gives_logits: bool = False
    """It is a masked language model whose head is used, for SPLADE."""
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: QueryExpansion | None = None
    processing_options: dict[str, Any] = field(default_factory=dict)


class TokenMask(Struct, frozen=True, kw_only=True):
    """Tokens whose vectors a late-interaction model leaves out."""

    skiplist_words: list[str] = field(default_factory=list)
    """Words of the vocabulary."""
    skiplist_tasks: list[str] = field(default_factory=lambda: ["document"])
    """The roles ("query", "document") whose tokens in the list are left out."""
    keep_only_token_ids: list[int] | None = None
    """Token ids of a document that are kept; all others are dropped. None: no such limit."""


class HeadModule(NamedTuple):
    """A head, and which vectors it is applied to."""

    level: Level
    head: Head


Module: TypeAlias = Transformer | Pooling | Splade | HeadModule | TokenMask | LogitScore

PUNCTUATION = TokenMask(skiplist_words=list(string.punctuation))
"""Default of PyLate's models: punctuation is left out of documents."""


def parse_module(listing: Path, entry: Any, default_level: Level) -> Module | None:
    """The module of an entry of modules.json; None for one that does nothing when a model is used
    (Dropout).

    `default_level` is that of a Dense module that does not say. Raises CheckpointError.
    """
    fields = JsonObject(f"{str(listing)!r}, in its list", entry)
    fields.ignore(("idx", "name"))
    path = fields.require("path", str)
    kind = fields.require("type", str)
    fields.get("kwargs", list)
    fields.finish()
    if path.startswith("/") or ".." in Path(path).parts:
        raise CheckpointError(
            f"{str(listing)!r} names the path {path!r}, which is outside its own folder."
        )
    name = _class_name(kind)
    if name is None:
        raise CheckpointError(
            f"{str(listing)!r} names a module of type {kind!r}, which is not understood. "
            f"{nearest(kind, _known_types())}"
        )
    if name in _TRANSFORMERS:
        if path and (listing.parent / path / "config.json").is_file():
            raise CheckpointError(
                f"{str(listing)!r} has the language model in the folder {path!r}, which is not "
                "supported: "
                "move its files beside modules.json."
            )
        return parse_transformer(listing.parent, path, _TRANSFORMERS[name])
    return _PARSERS[name](listing.parent / path, default_level)


def _class_name(kind: str) -> str | None:
    """The class that a type names: the path of a class, or, in old versions, of the module file of
    the same name."""
    home, _, name = kind.rpartition(".")
    if name not in (*_TRANSFORMERS, *_PARSERS):
        return None
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=MLM)(?=[A-Z])", "_", name).lower()
    homes = {
        "sentence_transformers",
        "sentence_transformers.models",
        f"sentence_transformers.models.{name}",
        f"pylate.models.{name}",
        "sentence_transformers.sparse_encoder.models",
        f"sentence_transformers.sparse_encoder.models.{name}",
    }
    rooms = (
        "base",
        "sentence_transformer",
        "cross_encoder",
        "multi_vector_encoder",
        "sparse_encoder",
    )
    homes |= {
        f"sentence_transformers.{room}.modules{end}" for room in rooms for end in ("", f".{snake}")
    }
    return name if home in homes else None


def _known_types() -> list[str]:
    return [f"sentence_transformers.models.{name}" for name in (*_TRANSFORMERS, *_PARSERS)]


def find_transformer_config(folder: Path) -> Path | None:
    """The file that describes the transformer module in `folder`; None where there is none."""
    return next((folder / name for name in _TRANSFORMER_FILES if (folder / name).is_file()), None)


def parse_transformer(
    root: Path, path: str = "", default_task: str = "feature-extraction"
) -> Transformer:
    """Settings in sentence_bert_config.json (or a file with one of its old names). Raises
    CheckpointError."""
    file = find_transformer_config(root / path)
    if file is None:
        return Transformer(path=path, gives_logits=default_task == "fill-mask")
    fields = JsonObject.read(file)
    fields.ignore(("unpad_inputs",))
    task = _check_output(fields, default_task)
    longest = _longest_of_arguments(fields)
    transformer = Transformer(
        path=path,
        max_seq_length=positive(fields, "max_seq_length") or longest,
        do_lower_case=fields.get("do_lower_case", bool) or False,
        gives_logits=task == "fill-mask",
        query_length=positive(fields, "query_length"),
        document_length=positive(fields, "document_length"),
        query_expansion=parse_expansion(fields),
        processing_options=fields.get("processing_kwargs", dict) or {},
    )
    fields.finish()
    return transformer


def _check_output(fields: JsonObject, default_task: str) -> str:
    """The transformer's task. It must hand on what this project's models give."""
    task = fields.get("transformer_task", str) or default_task
    output, part = _TASKS[choose(fields.source, "transformer_task", task, _TASKS)]
    choose(
        fields.source,
        "module_output_name",
        fields.get("module_output_name", str) or output,
        [output],
    )
    modalities = fields.get("modality_config", dict)
    if modalities is not None:
        text = JsonObject(f"{fields.source}, in modality_config", modalities.get("text"))
        text.ignore(("format",))
        choose(text.source, "method", text.require("method", str), ["forward"])
        choose(text.source, "method_output_name", text.require("method_output_name", str), [part])
        text.finish()
    return task


def _longest_of_arguments(fields: JsonObject) -> int | None:
    """`model_max_length` among the arguments of model, config and tokenizer. Raises CheckpointError
    for one that changes results."""
    longest = None
    for new, old in (
        ("model_kwargs", "model_args"),
        ("config_kwargs", "config_args"),
        ("processor_kwargs", "tokenizer_args"),
    ):
        for key in (new, old):
            arguments = JsonObject(f"{fields.source}, in {key}", fields.get(key, dict) or {})
            arguments.ignore(_HARMLESS)
            if new == "processor_kwargs":
                longest = positive(arguments, "model_max_length") or longest
                arguments.ignore(("padding_side",))
            arguments.finish()
    return longest


def parse_expansion(fields: JsonObject) -> QueryExpansion | None:
    """The key `query_expansion`. Raises CheckpointError."""
    values = fields.get("query_expansion", dict)
    if values is None:
        return None
    inner = JsonObject(f"{fields.source}, in query_expansion", values)
    strategy = choose(inner.source, "strategy", inner.require("strategy", str), ["fixed", "min"])
    length = positive(inner, "length")
    if length is None:
        raise CheckpointError(f"{inner.source} does not say 'length'.")
    attend = inner.get("attend", bool) or False
    token = inner.get("token", str)
    inner.finish()
    return QueryExpansion(
        length=length,
        strategy="fixed" if strategy == "fixed" else "min",
        attend=attend,
        token=token,
    )


def _parse_pooling(folder: Path, _: Level) -> Pooling:
    fields = JsonObject.read(folder / "config.json")
    size = positive(
        fields,
        "embedding_dimension" if "embedding_dimension" in fields else "word_embedding_dimension",
    )
    if size is None:
        raise CheckpointError(
            f"{fields.source} says neither 'embedding_dimension' nor 'word_embedding_dimension'."
        )
    old = [mode for key, mode in OLD_MODES.items() if fields.get(key, bool)]
    modes = _modes(fields) if "pooling_mode" in fields else old
    fields.ignore(("pooling_mode",))
    if not modes:
        raise CheckpointError(
            f"{fields.source} turns no pooling mode on. Known: pooling_mode {', '.join(MODES)}; "
            f"{', '.join(OLD_MODES)}."
        )
    include_prompt = fields.get("include_prompt", bool)
    fields.finish()
    return Pooling(
        size=size,
        methods=tuple(MODES[mode] for mode in modes),
        include_prompt=include_prompt is not False,
    )


def _modes(fields: JsonObject) -> list[str]:
    """The key `pooling_mode`: one name, or several whose vectors are concatenated."""
    value = fields.pop("pooling_mode")
    modes = value if isinstance(value, list) else [value]
    return [choose(fields.source, "pooling_mode", mode, MODES) for mode in modes]


def _parse_splade(folder: Path, _: Level) -> Splade:
    fields = JsonObject.read(folder / "config.json")
    fields.ignore(("embedding_dimension", "word_embedding_dimension", "chunk_size"))
    strategy = fields.get("pooling_strategy", str) or "max"
    activation = fields.get("activation_function", str) or "relu"
    choose(fields.source, "pooling_strategy", strategy, ["max", "sum"])
    choose(fields.source, "activation_function", activation, ["relu", "log1p_relu"])
    fields.finish()
    return Splade(
        strategy="max" if strategy == "max" else "sum", log_twice=activation == "log1p_relu"
    )


def _parse_dense(folder: Path, default_level: Level) -> HeadModule:
    fields = JsonObject.read(folder / "config.json")
    level = _level(fields, default_level)
    sizes = positive(fields, "in_features"), positive(fields, "out_features")
    if None in sizes:
        raise CheckpointError(f"{fields.source} does not say 'in_features' and 'out_features'.")
    dense = Dense(
        folder=str(folder),
        in_features=sizes[0] or 0,
        out_features=sizes[1] or 0,
        bias=fields.require("bias", bool),
        activation=activation_class(
            fields.source, "activation_function", fields.require("activation_function", str)
        ),
        residual=fields.get("use_residual", bool) or False,
    )
    fields.finish()
    return HeadModule(level, dense)


def _level(fields: JsonObject, default: Level) -> Level:
    """Kind of vectors that a module takes; it gives the same kind."""
    taken = fields.get("module_input_name", str)
    output_name = fields.get("module_output_name", str) or taken
    if taken is None:
        return default
    level = _LEVELS[choose(fields.source, "module_input_name", taken, _LEVELS)]
    choose(fields.source, "module_output_name", output_name or taken, [taken])
    return level


def _parse_layer_norm(folder: Path, _: Level) -> HeadModule:
    fields = JsonObject.read(folder / "config.json")
    size = positive(fields, "dimension")
    if size is None:
        raise CheckpointError(f"{fields.source} does not say 'dimension'.")
    fields.finish()
    return HeadModule("sentence", LayerNorm(folder=str(folder), size=size))


def _parse_normalize(folder: Path, _: Level) -> HeadModule:
    # Old versions saved no config.json, or an empty one: the module had nothing to say.
    if not (folder / "config.json").is_file():
        return HeadModule("sentence", Normalize())
    fields = JsonObject.read(folder / "config.json")
    level = _level(fields, "sentence")
    fields.finish()
    return HeadModule(level, Normalize())


def _parse_token_mask(folder: Path, _: Level) -> TokenMask:
    fields = JsonObject.read(folder / "config.json")
    words = fields.get("skiplist_words", list)
    tasks = fields.get("skiplist_tasks", list)
    mask = TokenMask(
        skiplist_words=words or [],
        skiplist_tasks=["document"] if tasks is None else tasks,
        keep_only_token_ids=fields.get("keep_only_token_ids", list),
    )
    fields.finish()
    return mask


def _parse_logit_score(folder: Path, _: Level) -> LogitScore:
    fields = JsonObject.read(folder / "config.json")
    choose(
        fields.source,
        "module_input_name",
        fields.get("module_input_name", str) or "causal_logits",
        ["causal_logits"],
    )
    score = LogitScore(
        true_token_id=fields.require("true_token_id", int),
        false_token_id=fields.get("false_token_id", int),
    )
    fields.finish()
    return score


def _parse_dropout(folder: Path, _: Level) -> None:
    return None


_PARSERS: dict[str, Callable[[Path, Level], Module | None]] = {
    "Pooling": _parse_pooling,
    "SpladePooling": _parse_splade,
    "Dense": _parse_dense,
    "LayerNorm": _parse_layer_norm,
    "Normalize": _parse_normalize,
    "MultiVectorMask": _parse_token_mask,
    "LogitScore": _parse_logit_score,
    "Dropout": _parse_dropout,
}


def activation_class(source: str, key: str, path: str) -> str:
    """The class of torch.nn that a path names ("torch.nn.modules.activation.Tanh" -> "Tanh").
    Raises CheckpointError."""
    match = re.fullmatch(r"torch\.nn\.(?:modules\.\w+\.)?(\w+)", path)
    if match is None or match[1] not in ACTIVATIONS:
        known = ", ".join(f"torch.nn.{name}" for name in ACTIVATIONS)
        raise CheckpointError(
            f"{source}: {key!r} is {path!r}, which is not understood. Known: {known}."
        )
    return match[1]


def positive(fields: JsonObject, key: str) -> int | None:
    """The value of a key that is a count, or missing. Raises CheckpointError."""
    value = fields.get(key, int)
    if value is not None and value < 1:
        raise CheckpointError(f"{fields.source}: {key!r} must be at least 1, not {value}.")
    return value
