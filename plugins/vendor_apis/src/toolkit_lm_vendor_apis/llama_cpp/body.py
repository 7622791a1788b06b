"""Request bodies of llama.cpp's routes, and their translation to completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import SkipValidation, WithJsonSchema
from toolkit_lm.errors import RequestError
from toolkit_lm_server.fields import Items
from toolkit_lm_server.json_body import ManyItems
from toolkit_lm_server.message_schemas import AnyMessage, AnyTool
from toolkit_lm_server.protocol import RenderBody, SamplingBody, examples
from toolkit_lm_server.render_protocol import TokenizeBody
from toolkit_lm_server.request_fields import INFILL, TOKENS

NAMES = {
    "max_tokens": "n_predict",
    "logprobs": "n_probs",
    "repetition_penalty": "repeat_penalty",
}
"""llama.cpp's names of sampling parameters, by ours."""
_WITHOUT_PLACE = (
    "prompt_logprobs",
    "return_token_ids",
    "logprob_token_ids",
    "return_tokens_as_token_ids",
    "return_hidden_states",
    "return_routed_experts",
)
_OWN = (
    *("prompt", "n_predict", "n_probs", "return_tokens", "timings_per_token"),
    *("return_progress", "id_slot"),
    *("response_fields", "logit_bias"),
)
_MOST_BIASES = 300
_MOST_TEXTS = 256
"""Most texts among the token ids of one prompt: each is tokenized by itself."""
_LEAST = -100
"""The bias of a token that must not come."""
RANDOM_SEED = 2**32 - 1
"""llama.cpp's seed for a seed of chance, as is any below 0."""
PROMPT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "integer"},
                    {
                        "type": "array",
                        "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                    },
                ]
            },
        },
    ]
}
"""The JSON schema of a prompt, or of a list of prompts."""
Part = str | int
"""A part of a mixed prompt: a text, or a token id."""
LlamaPrompt = str | list[Part]
"""One prompt: a text, or token ids and texts."""


class LlamaCompletionBody(SamplingBody):
    """The body of POST /completion."""

    model_config = examples(
        {"prompt": "Once upon a time", "n_predict": 8},
        {"prompt": ["Once upon", "The cat"], "n_predict": 8, "stream": True},
    )

    verdicts = INFILL

    prompt: Annotated[Any, SkipValidation, WithJsonSchema(PROMPT)]
    """The prompts: a text, a list of token ids that may have texts among them, or a list of
    prompts."""
    n_predict: int | None = None
    """Most tokens of an answer. -1, and none given: as many as fit. 0: the prompt is read, and
    nothing generated."""
    n_probs: int | None = None
    """Number of likeliest tokens that are told for each token, with their log probabilities."""
    logit_bias: dict[str, Any] | Items[Items[Any]] | None = None
    """Numbers added to logits: by token id, or pairs of a token id or a text with a number. false
    in place of the number: the token never comes."""
    return_tokens: bool = False
    """The answer has the ids of its tokens, too."""
    timings_per_token: bool = False
    """Each event of a stream has timings, too."""
    return_progress: bool = False
    """A stream begins with an event that tells of the prompt, once it is read."""
    id_slot: int = -1
    """The slot whose content POST /slots/{slot} saves. -1: the slot 0."""
    response_fields: Items[str] | None = None
    """The only fields of an answer, with slashes for those inside of others:
    "generation_settings/n_predict"."""

    def prompts(self, most: int) -> list[LlamaPrompt]:
        """The prompts: one at least, and no more than `most`. Raises RequestError."""
        return prompts_of(self.prompt, "prompt", most, "max_prompts")

    @property
    def is_several(self) -> bool:
        """Whether the body has a list of prompts. A list with a token id is one prompt."""
        return is_several(self.prompt)

    def biases(self) -> list[tuple[Part, float]]:
        """Biases by token id or text. Raises RequestError."""
        value = self.logit_bias or {}
        by_key = isinstance(value, dict)
        pairs = [*map(list, value.items())] if isinstance(value, dict) else value
        if len(pairs) > _MOST_BIASES:
            raise RequestError(f"logit_bias must have at most {_MOST_BIASES} items.", "logit_bias")
        made: list[tuple[Part, float]] = []
        for pair in pairs:
            match pair:
                case [str() | int() as token, bool() | int() | float() as bias] if (
                    bias is not True and type(token) is not bool
                ):
                    part = _key(token) if isinstance(token, str) and by_key else token
                    made.append((part, _LEAST if bias is False else bias))
                case _:
                    raise RequestError(
                        "logit_bias must have pairs of a token id or a text with a number or "
                        "false: [[15043, 1.0]].",
                        "logit_bias",
                    )
        return made

    def completion(self) -> dict[str, Any]:
        """The fields of a plain completion, without its prompt and biases. Raises RequestError."""
        for name in _WITHOUT_PLACE:
            if getattr(self, name, None) not in (None, False):
                raise RequestError(
                    f"{name} is for /v1/completions: an answer here has no place for it.", name
                )
        fields: dict[str, Any] = self.model_dump(
            exclude_unset=True, exclude={*_OWN, "stream_options"}
        )
        if self.max_tokens is None:
            fields["n_predict"] = -1 if self.n_predict is None else self.n_predict
        if self.reads_only:
            # A prompt is read without an answer for its log probabilities, as one piece.
            fields |= {"prompt_logprobs": 0, "stream": False}
        if self.seed is not None and (self.seed < 0 or self.seed == RANDOM_SEED):
            del fields["seed"]
        if self.n_probs:
            fields["logprobs"] = self.n_probs
        return fields

    @property
    def reads_only(self) -> bool:
        """Whether the prompt is read, and nothing generated."""
        most = self.n_predict if self.max_tokens is None else self.max_tokens
        return most == 0


def is_several(value: Any) -> bool:
    """Whether a value is a list of prompts. A list with a token id is one prompt."""
    return isinstance(value, list) and not any(type(part) is int for part in value)


def prompts_of(value: Any, name: str, most: int, option: str) -> list[LlamaPrompt]:
    """The prompts in a field: one at least, and no more than `most`, which the server's `option`
    says. `name`: the field. Raises RequestError."""
    if not is_several(value):
        return [_prompt(value, name)]
    if not value:
        raise RequestError(f"{name} is an empty list: give at least one prompt.", name)
    if len(value) > most:
        raise RequestError(
            f"{name} has {len(value)} prompts; this server takes at most {most} in one request "
            f"({option}). Send them in several requests.",
            name,
        )
    return [_prompt(item, f"{name}[{index}]") for index, item in enumerate(value)]


def _key(token: str) -> Part:
    """The token of a mapping's key: JSON writes ids as texts there."""
    return int(token) if token.isascii() and token.isdigit() and len(token) < 12 else token


def _prompt(value: Any, name: str) -> LlamaPrompt:
    """One prompt. Raises RequestError for the field that has it."""
    field = name.partition("[")[0]
    if isinstance(value, dict) and isinstance(value.get("prompt_string"), str):
        if value.get("multimodal_data"):
            raise RequestError(
                f"{name}: images and other media are for messages: ask /v1/chat/completions.",
                field,
            )
        return str(value["prompt_string"])
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(
        isinstance(part, str) or type(part) is int for part in value
    ):
        raise RequestError(f"{name} must be a text, or a list of token ids and texts.", field)
    if sum(isinstance(part, str) for part in value) > _MOST_TEXTS:
        raise RequestError(
            f"{name} must have at most {_MOST_TEXTS} texts among its token ids: join them.",
            field,
        )
    return value


class ApplyTemplateBody(RenderBody):
    """The body of POST /apply-template."""

    model_config = examples({"messages": [{"role": "user", "content": "hi"}]})

    verdicts = TOKENS

    messages: ManyItems[AnyMessage]
    """The conversation, the oldest message first."""
    tools: Items[AnyTool] | None = None
    """Functions that the chat template is given."""

    def render_options(self) -> dict[str, Any]:
        return super().render_options() | ({"tools": self.tools} if self.tools else {})


class LlamaTokenizeBody(TokenizeBody):
    """The body of POST /tokenize: llama.cpp's has `content`, and vLLM's has not."""

    model_config = examples({"content": "Once upon a time"}, {"prompt": "Once upon a time"})

    content: Annotated[Any, SkipValidation, WithJsonSchema(PROMPT)] = None
    """The text, or a list of texts and token ids."""
    add_special: bool = False
    """The tokenizer's special tokens are added."""
    with_pieces: bool = False
    """The answer has each token's text, too, or its bytes where they are a part of a character."""

    def refuse_options(self) -> None:
        """Raises RequestError for llama.cpp's options in a body without `content`."""
        for name in ("add_special", "with_pieces"):
            if getattr(self, name):
                raise RequestError(f"{name} is for content.", name)

    def parts(self) -> LlamaPrompt:
        """The content. Raises RequestError."""
        return _prompt(self.content, "content")
