"""Reads a checkpoint's settings for sentence-transformers: modules.json, each module's config.json,
and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from toolkit_lm.errors import CheckpointError
from toolkit_lm_poolers.details import Dense, Head, LogitScore, Normalize, Pooling, Splade

from toolkit_lm_sentence_transformers.artifact_metadata import (
    ArtifactMetadata,
    read_artifact_metadata,
)
from toolkit_lm_sentence_transformers.json_file import JsonObject, choose, read_json_file
from toolkit_lm_sentence_transformers.module_config import (
    PUNCTUATION,
    HeadModule,
    Module,
    QueryExpansion,
    TokenMask,
    Transformer,
    activation_class,
    find_transformer_config,
    parse_expansion,
    parse_module,
    parse_transformer,
    positive,
)

_SIMILARITIES = {
    name: name for name in ("cosine", "dot", "euclidean", "manhattan", "maxsim", "meanmaxsim")
} | {
    "dot_product": "dot",
    "MaxSim": "maxsim",
}
_MODEL_TYPES = (
    "SentenceTransformer",
    "CrossEncoder",
    "MultiVectorEncoder",
    "ColBERT",
    "SparseEncoder",
)
_PYLATE_KEYS = (
    "query_prefix",
    "document_prefix",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "skiplist_words",
)
_PYLATE_QUERY = 32
"""Tokens of a query of PyLate's models that do not say."""


class SentenceTransformersConfig(Struct, frozen=True, kw_only=True):
    """A checkpoint's sentence-transformers files, in the one form that their old and new versions
    share."""

    folder: str
    has_modules: bool = False
    """There is a modules.json: what it does not list is not done."""
    transformer: Transformer = field(default_factory=Transformer)
    """The model itself: its longest input, and how input is prepared."""
    pooling: Pooling | None = None
    splade: Splade | None = None
    """Pooling of a masked language model's logits, in the place of `pooling`."""
    heads: tuple[Head, ...] = ()
    """Heads applied to the pooled vector, in order."""
    token_heads: tuple[Head, ...] = ()
    """Heads applied to each token's vector, in order, before any pooling."""
    token_mask: TokenMask | None = None
    """Tokens that a late-interaction model leaves out; None for other models."""
    logit_score: LogitScore | None = None
    vector_size: int | None = None
    """Size of a token's vector, by artifact.metadata; None: that library did not save the model."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Texts that are put before the input, by name ("query", "document", ...)."""
    markers: dict[str, str] = field(default_factory=dict)
    """Markers that some prompts begin with, by prompt name. A marker is one token if the vocabulary
    has it."""
    default_prompt_name: str | None = None
    similarity: str | None = None
    """cosine, dot, euclidean, manhattan, maxsim or meanmaxsim; None: not said."""
    truncate_dim: int | None = None
    """Dimensions that are kept of an embedding where a request does not say."""
    activation: str | None = None
    """A cross-encoder's activation, a class of torch.nn ("Sigmoid", "Identity", ...); None: not
    said."""

    @property
    def max_seq_length(self) -> int | None:
        """Tokens of the longest input, special tokens included; None: not said."""
        transformer = self.transformer
        expansion = self.transformer.query_expansion
        if transformer.max_seq_length is None:
            return None
        # PyLate's own count of a document leaves its marker out.
        lengths = (
            transformer.query_length,
            transformer.document_length,
            expansion.length if expansion is not None else None,
        )
        return max(transformer.max_seq_length, *(length or 0 for length in lengths))

    @property
    def embedding_size(self) -> int | None:
        """Size of an embedding; None: not said."""
        if self.vector_size is not None:
            return self.vector_size
        sizes = [
            head.out_features for head in self.heads or self.token_heads if isinstance(head, Dense)
        ]
        if sizes:
            return sizes[-1]
        return self.pooling.size * len(self.pooling.methods) if self.pooling else None


def read_sentence_transformers(
    folder: Path, hf_config: dict[str, Any]
) -> SentenceTransformersConfig | None:
    """Settings in the sentence-transformers files of a checkpoint; None if there are none.
    `hf_config`: its config.json.

    The formats of all versions are read. Raises CheckpointError that names the file, and the
    module, key or value that is not understood."""
    listing = folder / "modules.json"
    general_path = folder / "config_sentence_transformers.json"
    fields = JsonObject(repr(str(folder / "config.json")), hf_config)
    activation = _activation_of_model(fields)
    # The class of the library of ColBERT's authors.
    metadata = (
        read_artifact_metadata(folder)
        if "HF_ColBERT" in (fields.get("architectures", list) or [])
        else None
    )
    known = (
        metadata is not None
        or activation is not None
        or find_transformer_config(folder) is not None
    )
    if not (known or listing.is_file() or general_path.is_file()):
        return None
    general = _read_general(general_path) if general_path.is_file() else _General()
    modules: list[Module]
    if listing.is_file():
        modules = _read_modules(listing, general)
    elif metadata is not None:
        _add_metadata(general, metadata)
        modules = [parse_transformer(folder), general.skiplist]
    else:
        modules = [parse_transformer(folder)]
    if general.lengths and isinstance(modules[0], Transformer):
        modules[0] = _with_lengths(modules[0], general.lengths)
    return SentenceTransformersConfig(
        folder=str(folder),
        has_modules=listing.is_file(),
        vector_size=None if metadata is None else metadata.dim,
        prompts=general.prompts,
        markers=general.markers,
        default_prompt_name=general.default_prompt_name,
        similarity=general.similarity or _default_similarity(modules),
        truncate_dim=general.truncate_dim,
        activation=general.activation or activation,
        **_sorted(modules, listing),
    )


def _default_similarity(modules: list[Module]) -> str | None:
    """Similarity of models that do not say. sentence-transformers' default for sparse vectors is
    the dot product."""
    return "dot" if any(isinstance(module, Splade) for module in modules) else None


class _General(Struct, kw_only=True):
    """config_sentence_transformers.json."""

    model_type: str | None = None
    activation: str | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    markers: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str | None = None
    truncate_dim: int | None = None
    lengths: dict[str, Any] = field(default_factory=dict)
    """Settings of the transformer that PyLate's models keep in this file."""
    skiplist: TokenMask = PUNCTUATION


def _read_general(path: Path) -> _General:
    fields = JsonObject.read(path)
    fields.ignore(("__version__", "requirements", "keep_in_fp32_modules"))
    general = _General(
        model_type=fields.get("model_type", str),
        prompts=_prompts(fields),
        default_prompt_name=fields.get("default_prompt_name", str),
        truncate_dim=positive(fields, "truncate_dim"),
    )
    if general.model_type is not None:
        choose(fields.source, "model_type", general.model_type, _MODEL_TYPES)
    if general.default_prompt_name is not None:
        choose(fields.source, "default_prompt_name", general.default_prompt_name, general.prompts)
    if (similarity := fields.get("similarity_fn_name", str)) is not None:
        general.similarity = _SIMILARITIES[
            choose(fields.source, "similarity_fn_name", similarity, _SIMILARITIES)
        ]
    if (activation := fields.get("activation_fn", str)) is not None:
        general.activation = activation_class(fields.source, "activation_fn", activation)
    _read_pylate(fields, general)
    fields.finish()
    return general


def _prompts(fields: JsonObject) -> dict[str, str]:
    prompts = fields.get("prompts", dict) or {}
    for name, text in prompts.items():
        if not isinstance(text, str | None):
            raise CheckpointError(
                f"{fields.source}: the prompt {name!r} must be text, not {text!r}."
            )
    return {name: text for name, text in prompts.items() if text is not None}


def _read_pylate(fields: JsonObject, general: _General) -> None:
    """Reads PyLate's keys. Its models put a marker before the prompt, and pad queries by
    default."""
    if not any(
        key in fields
        for key in (*_PYLATE_KEYS, "query_length", "document_length", "query_expansion")
    ):
        return
    for name in ("query", "document"):
        if prefix := fields.get(f"{name}_prefix", str):
            general.markers[name] = prefix
            general.prompts[name] = prefix + general.prompts.get(name, "").removeprefix(prefix)
    length = positive(fields, "query_length")
    document_length = positive(fields, "document_length")
    expands = fields.get("do_query_expansion", bool)
    attends = fields.get("attend_to_expansion_tokens", bool)
    if "query_expansion" in fields:
        expansion = parse_expansion(fields)
    elif expands is not False:
        expansion = QueryExpansion(length=length or _PYLATE_QUERY, attend=bool(attends))
    else:
        expansion = None
    lengths = {"query_length": length, "document_length": document_length}
    general.lengths = {key: value for key, value in lengths.items() if value is not None} | {
        "query_expansion": expansion
    }
    if (words := fields.get("skiplist_words", list)) is not None:
        general.skiplist = TokenMask(skiplist_words=words)
    # Its first versions did not name a type.
    general.model_type = general.model_type or "ColBERT"


def _add_metadata(general: _General, metadata: ArtifactMetadata) -> None:
    """Adds the settings of the ColBERT authors' library. Those in sentence-transformers' files take
    precedence."""
    general.markers = {
        "query": f"{metadata.query_marker} ",
        "document": f"{metadata.document_marker} ",
    }
    general.prompts = general.markers | general.prompts
    general.skiplist = PUNCTUATION if metadata.mask_punctuation else TokenMask()
    general.lengths = {
        "document_length": metadata.document_length,
        "query_expansion": QueryExpansion(length=metadata.query_length, attend=metadata.attend),
        **general.lengths,
    }


def _with_lengths(transformer: Transformer, lengths: dict[str, Any]) -> Transformer:
    """With what the module's own file leaves open."""
    left_open = {
        key: value
        for key, value in lengths.items()
        if value is not None and getattr(transformer, key) is None
    }
    return msgspec.structs.replace(transformer, **left_open)


def _read_modules(path: Path, general: _General) -> list[Module]:
    """The chain that modules.json lists."""
    listed = read_json_file(path)
    if not isinstance(listed, list) or not listed:
        raise CheckpointError(f"{str(path)!r} must hold a list of modules.")
    token_level = general.model_type in ("ColBERT", "MultiVectorEncoder")
    found = (parse_module(path, entry, "token" if token_level else "sentence") for entry in listed)
    modules = [module for module in found if module is not None]
    if general.model_type == "ColBERT":
        # PyLate lists its Transformer and Dense only. It skips punctuation and normalizes without
        # saying so.
        modules += [general.skiplist, HeadModule("token", Normalize())]
    return modules


def _sorted(modules: list[Module], path: Path) -> dict[str, Any]:
    """The modules by what they do. Raises CheckpointError where their order makes no sense."""
    found: dict[str, Any] = {"heads": (), "token_heads": ()}
    for index, module in enumerate(modules):
        if isinstance(module, Transformer) != (index == 0):
            raise CheckpointError(
                f"{str(path)!r}: the first module, and no other, must be a Transformer."
            )
        if isinstance(module, HeadModule):
            pooled = "pooling" in found or "splade" in found
            if pooled != (module.level == "sentence"):
                where = (
                    f"{module.level} vectors stands {'after' if pooled else 'before'} the "
                    "Pooling module"
                )
                raise CheckpointError(f"{str(path)!r}: a {type(module.head).__name__} of {where}.")
            key = "heads" if pooled else "token_heads"
            found[key] = (*found[key], module.head)
            continue
        names = {
            Transformer: "transformer",
            Pooling: "pooling",
            Splade: "splade",
            TokenMask: "token_mask",
            LogitScore: "logit_score",
        }
        name = names[type(module)]
        if name in found:
            raise CheckpointError(
                f"{str(path)!r} lists more than one {type(module).__name__} module."
            )
        found[name] = module
    if found["transformer"].gives_logits != ("splade" in found):
        raise CheckpointError(
            f"{str(path)!r}: SpladePooling pools the logits of a Transformer whose task is "
            "'fill-mask', and nothing else does."
        )
    return found


def _activation_of_model(hf_config: JsonObject) -> str | None:
    """A cross-encoder's activation in config.json: since version 4 in an object
    `sentence_transformers`, before that in a key."""
    if (values := hf_config.get("sentence_transformers", dict)) is not None:
        fields = JsonObject(f"{hf_config.source}, in sentence_transformers", values)
        fields.ignore(("version",))
        activation = fields.get("activation_fn", str)
        fields.finish()
        return (
            activation_class(fields.source, "activation_fn", activation)
            if activation is not None
            else None
        )
    old = hf_config.get("sbert_ce_default_activation_function", str)
    return (
        activation_class(hf_config.source, "sbert_ce_default_activation_function", old)
        if old is not None
        else None
    )
