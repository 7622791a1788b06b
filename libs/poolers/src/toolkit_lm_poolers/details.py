"""A checkpoint's settings of poolers and texts as data: the details of a `PoolingProfile`. Imports
no torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct, convert, field, json
from toolkit_lm.config import PoolingProfile

ACTIVATIONS = (
    "Identity",
    "Tanh",
    "ReLU",
    "GELU",
    "SiLU",
    "Sigmoid",
    "ELU",
    "LeakyReLU",
    "Mish",
    "Softplus",
)
"""Classes of torch.nn that a profile may name."""


class Pooling(Struct, frozen=True, kw_only=True):
    """Vectors of tokens to one vector: the methods' vectors side by side."""

    size: int
    """Size of a token's vector."""
    methods: tuple[str, ...]
    """Keys of toolkit_lm_poolers.METHODS."""
    include_prompt: bool = True
    """The tokens of a prompt that goes before a text are pooled too."""


class Splade(Struct, frozen=True, kw_only=True):
    """Logits of a masked language model to one weight for each token of the vocabulary (Formal et
    al. 2021): log(1 + relu(logit)), the most or the sum over a text's tokens."""

    strategy: Literal["max", "sum"] = "max"
    log_twice: bool = False
    """log(1 + x) is taken a second time."""


class Dense(Struct, frozen=True, kw_only=True, tag="dense"):
    """activation(x W^T + b), plus x (or a projection of it) where `residual`."""

    folder: str
    """Folder of the weights, or their file: FlagEmbedding's are files of their own."""
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """One of ACTIVATIONS."""
    residual: bool = False


class LayerNorm(Struct, frozen=True, kw_only=True, tag="layer_norm"):
    """Layer normalisation with learned scale and bias. Weights lie in `folder`."""

    folder: str
    size: int


class Normalize(Struct, frozen=True, kw_only=True, tag="normalize"):
    """To length 1 (L2)."""


Head: TypeAlias = Dense | LayerNorm | Normalize


class Lexical(Struct, frozen=True, kw_only=True):
    """A weight of each token of a text, for matches by token (Chen et al. 2024: BGE-M3)."""

    head: Dense
    """Gives one number. relu makes it the weight."""
    left_out: frozenset[int] = frozenset()
    """Tokens whose weight is 0: special ones."""


class LogitScore(Struct, frozen=True, kw_only=True):
    """A cross-encoder's score from a language model's logits: of one token, or the difference of
    two."""

    true_token_id: int
    false_token_id: int | None = None


class Marker(Struct, frozen=True, kw_only=True):
    """Text that a role's prompt begins with, and its token."""

    text: str
    token_id: int


class RoleProfile(Struct, frozen=True, kw_only=True):
    """How a late-interaction model reads the texts of one role, "query" or "document", and which of
    their tokens it compares."""

    prompt: str = ""
    """Goes before each text, the marker included."""
    suffix: str = ""
    """Goes after each text, which then gets no special tokens of the tokenizer's own: prompt and
    suffix have them."""
    marker: Marker | None = None
    max_tokens: int | None = None
    """Tokens after which a text is truncated, marker and special tokens included. None: the role
    has no limit."""
    filler: int | None = None
    """The token with which texts are filled up to `filled` tokens."""
    filled: int = 0
    attend: bool = True
    """The model's attention sees the tokens that are filled in."""
    left_out: frozenset[int] = frozenset()
    """Tokens that are not compared."""
    kept: frozenset[int] | None = None
    """Only these are compared. None: all but `left_out`."""


class PoolingDetails(Struct, frozen=True, kw_only=True):
    """A checkpoint's settings of poolers and texts."""

    folder: str
    """Folder of the files, for errors."""
    is_complete: bool = False
    """The files list all that is done: without `pooling` nothing is pooled. False: the model class
    says the rest."""
    lower_case: bool = False
    """Input is lower-cased before it is tokenized."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Texts that are put before the input, by name ("query", "document", ...)."""
    default_prompt_name: str | None = None
    roles: dict[str, RoleProfile] = field(default_factory=dict)
    """"query" and "document" of a model that treats them differently; {} for others."""
    picture: str | None = None
    """Text, with a placeholder, in which a picture without text of its own is read. None: pictures
    need texts."""
    pooling: Pooling | None = None
    splade: Splade | None = None
    """Pooling in the place of `pooling`, of a masked language model's logits."""
    heads: tuple[Head, ...] = ()
    """Heads applied to the pooled vector, in order."""
    token_heads: tuple[Head, ...] = ()
    """Heads applied to each token's vector, in order, before any pooling."""
    lexical: Lexical | None = None
    """Weights of tokens, beside embeddings."""
    multi_vector: Dense | None = None
    """Head of each token's vector in the place of `token_heads`; the vectors get length 1."""
    embedding_size: int | None = None
    """Size of an embedding; None: not said."""
    truncate_dim: int | None = None
    """Dimensions that are kept of an embedding where a request does not say."""
    similarity: str | None = None
    """cosine, dot, euclidean, manhattan, maxsim or meanmaxsim; None: not said."""
    logit_score: LogitScore | None = None
    activation: str | None = None
    """A cross-encoder's activation, one of ACTIVATIONS; None: not said."""
    refusal: str | None = None
    """Why texts cannot be read as the files want it: an engine that pools is refused. None: they
    can be."""

    @property
    def ends_normalized(self) -> bool:
        """The heads give embeddings of length 1."""
        return bool(self.heads) and isinstance(self.heads[-1], Normalize)

    def as_profile(self, max_tokens: int | None = None) -> PoolingProfile:
        """For a reader of profiles. `max_tokens`: of the longest input, special tokens included;
        None: not said."""
        details = json.decode(json.encode(self, order="deterministic"))
        return PoolingProfile(
            is_complete=self.is_complete,
            max_tokens=max_tokens,
            scores=self.logit_score is not None,
            details=details,
        )


def details_of(profile: PoolingProfile | None) -> PoolingDetails | None:
    """None where a checkpoint has no profile."""
    return None if profile is None else convert({"folder": "", **profile.details}, PoolingDetails)
