"""Request bodies of pooling models: the fields of OpenAI, vLLM, Jina and Cohere, and our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import Field, SkipValidation, WithJsonSchema
from toolkit_lm.config import POOLING_TASKS
from toolkit_lm.errors import ContextLengthError, RequestError
from toolkit_lm.outputs import PoolingRequestOutput
from toolkit_lm.pooling_params import POOLING_PARAMS, PoolingParams
from toolkit_lm.prompts import Prompt, Scored, TokensPrompt

from toolkit_lm_server.errors import missing
from toolkit_lm_server.fields import Items
from toolkit_lm_server.message_schemas import AnyMessage
from toolkit_lm_server.protocol import EngineBody, RenderBody, examples
from toolkit_lm_server.request_fields import ACTIVATION, POOLING, refused, renamed

EncodingFormat = Literal["float", "base64"]
BytesFormat = Literal["bytes", "bytes_only"]
"""Formats of answers that are not JSON. "bytes" has a header that describes the body."""
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
CohereType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
Media = dict[str, Any]
"""{"text": text}; {"image": URL}; or {"content": [parts of a message]}."""
AnyInput = Annotated[
    str | Media | list[int] | list[str | list[int] | list[AnyMessage] | Media], SkipValidation
]
"""Inputs that `read_inputs` or `read_conversations` checks. Their errors name the wrong one."""
_FORMS = (
    'must be a text, {"text": text}, {"image": URL} or {"content": [parts of a message]}, each '
    "alone."
)
_SPARSE_TASKS = ("embed", "token_classify")
Texts = Annotated[str | list[str | Media], SkipValidation]
"""Texts that `read_texts` checks."""
Documents = Annotated[str | Media | list[str | Media], SkipValidation]
"""Texts and prompts with media that `read_documents` checks."""


class Inputs(NamedTuple):
    """The inputs of a request. `names` has each input's name in errors."""

    prompts: list[Prompt]
    names: list[str]


class PoolingBody(EngineBody):
    """The fields that all routes of pooling models share."""

    verdicts = POOLING

    truncate_prompt_tokens: int | None = None
    """Longer inputs are cut to so many tokens. -1: to the model's maximum. None: they are an
    error."""
    truncation_side: Literal["right"] | None = None
    """Side at which inputs are cut: the end."""


class InputBody(PoolingBody, RenderBody):
    """Inputs, or conversations in their place. Conversations are rendered without a generation
    prompt."""

    input: AnyInput | None = None
    """The inputs: a text, a list of token ids, {"image": URL} or {"content": [parts of a message]};
    or a list of these. Messages with roles are read as `messages`."""
    messages: Items[AnyMessage | Items[AnyMessage]] | None = None
    """A conversation, in place of inputs; or a list of conversations."""
    prompt_name: str | None = None
    """The name of a prompt of the checkpoint's, which each input gets before it."""

    def check_input(self) -> None:
        """Raises ApiError or RequestError unless the body has either inputs or conversations."""
        if self.messages is not None and self.input is not None:
            raise RequestError("Give either 'input' or 'messages'.", "input")
        if self.messages is None and self.input is None:
            raise missing("input")
        if self.messages is None and not _has_roles(self.input):
            self.refuse_render_options()

    def conversations(self, most: int) -> dict[str, list[dict[str, Any]]]:
        """The conversations by their names in errors. Empty where the body has inputs. Raises
        RequestError for more than `most`."""
        if self.messages is not None:
            return read_conversations(self.messages, "messages", most)
        return read_conversations(self.input, "input", most) if _has_roles(self.input) else {}

    def render_options(self) -> dict[str, Any]:
        return {"add_generation_prompt": False, **super().render_options()}


class EmbeddingBody(InputBody):
    """The body of POST /v1/embeddings."""

    verdicts = {
        **POOLING,
        # vLLM activates vectors so, too.
        **renamed(
            normalized="normalize",
            **dict.fromkeys(("use_activation", "activation", "softmax"), "normalize"),
        ),
    }
    model_config = examples(
        {"input": "Once upon a time"}, {"messages": [{"role": "user", "content": "hi"}]}
    )

    task: str | None = None
    """Jina's: what the vectors are for, such as "retrieval.query". It names a prompt of the
    checkpoint's, or an adapter, or both. "embed" means nothing more."""
    encoding_format: EncodingFormat | BytesFormat = "float"
    """The form of vectors: numbers, base64, or a binary answer."""
    embed_dtype: EmbedDtype = "float32"
    """The dtype of numbers in base64 and in bytes."""
    endianness: Literal["native", "little", "big"] = "native"
    """Byte order of numbers in base64 and in bytes. "native" means little-endian."""
    dimensions: int | None = None
    """Dimensions that vectors are cut to, for models that allow it."""
    normalize: bool | None = None
    """Vectors are of length 1. null: as the model's config says."""
    sparse: bool = False
    """Vectors come as the indices and values of what is not 0: for models such as SPLADE. With the
    task token_classify they are the greatest weights of token ids: BGE-M3."""

    def check_input(self) -> None:
        super().check_input()
        if self.sparse and self.encoding_format != "float":
            raise RequestError(
                f"sparse true gives numbers, and encoding_format is {self.encoding_format!r}: "
                "leave one of them out.",
                "sparse",
            )

    def params(self) -> PoolingParams:
        return PoolingParams(task="embed", dimensions=self.dimensions, normalize=self.normalize)


class ClassifyBody(InputBody):
    """The body of POST /classify."""

    verdicts = {
        **POOLING,
        **ACTIVATION,
        **refused("classes are what this route gives", "task", "classify"),
    }
    model_config = examples({"input": "Once upon a time"})

    use_activation: bool | None = None
    """Outputs go through softmax or sigmoid. null: as the model's config says."""

    def params(self) -> PoolingParams:
        return PoolingParams(task="classify", use_activation=self.use_activation)


class AnyPoolingBody(EmbeddingBody):
    """The body of POST /pooling."""

    verdicts = {**POOLING, **ACTIVATION, **renamed(normalized="normalize")}
    model_config = examples({"input": "Once upon a time", "task": "embed"})

    task: Annotated[
        Any,
        WithJsonSchema({"anyOf": [{"type": "string", "enum": [*POOLING_TASKS]}, {"type": "null"}]}),
    ] = None
    """A task of PoolingParams. None: the model's only one."""
    use_activation: bool | None = None
    """Outputs go through softmax or sigmoid. null: as the model's config says."""
    step_tag_id: int | None = None
    """The token at which a reward model rates a step."""
    returned_token_ids: Items[int] | None = None
    """The tokens whose logits a reward model returns."""

    def params(self) -> PoolingParams:
        if self.sparse and self.task not in _SPARSE_TASKS:
            raise RequestError(
                f"sparse true is for the tasks {', '.join(_SPARSE_TASKS)}, not for {self.task!r}.",
                "sparse",
            )
        return PoolingParams(**{name: getattr(self, name) for name in POOLING_PARAMS})


class ScoreBody(PoolingBody):
    """The body of POST /score. The several names of each side mean the same."""

    verdicts = {**POOLING, **ACTIVATION}
    model_config = examples({"queries": "capital of France", "documents": ["Paris", "Rome"]})

    queries: Documents | None = None
    """The text, or the texts, of the first side."""
    text_1: Documents | None = None
    """Another name of queries."""
    data_1: Documents | None = None
    """Another name of queries."""
    documents: Documents | None = None
    """The text, or the texts, of the second side."""
    text_2: Documents | None = None
    """Another name of documents."""
    data_2: Documents | None = None
    """Another name of documents."""
    items: Documents | None = None
    """Another name of documents."""
    instruction: str | None = None
    """An instruction for models that take one."""
    use_activation: bool | None = None
    """Outputs go through softmax or sigmoid. null: as the model's config says."""

    def texts(self, most: int) -> dict[str, Scored | list[Scored]]:
        """Queries and documents, in this order, by the names that the body gives them. Raises
        RequestError."""
        sides: dict[str, Scored | list[Scored]] = {}
        for names in (("queries", "text_1", "data_1"), ("documents", "text_2", "data_2", "items")):
            present = [name for name in names if getattr(self, name) is not None]
            if len(present) != 1:
                raise RequestError(f"Give one of {', '.join(map(repr, names))}.", names[0])
            value = getattr(self, present[0])
            sides[present[0]] = (
                value if isinstance(value, str) else read_documents(value, present[0], most)
            )
        return sides


class RerankBody(PoolingBody):
    """The body of POST /rerank, as Jina and vLLM have it."""

    verdicts = {**POOLING, **ACTIVATION}
    model_config = examples({"query": "capital of France", "documents": ["Paris", "Rome"]})

    query: str
    """The text that documents are compared with."""
    documents: Documents
    """The documents, at least one: texts, {"text": text}, {"image": URL}, or {"content": [parts of
    a message]}."""
    top_n: Annotated[int, Field(ge=1)] | None = None
    """Most documents in the answer. null: all."""
    return_documents: bool = True
    """The answer has the documents' texts."""
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """Longer documents are cut to so many tokens."""
    instruction: str | None = None
    """An instruction for models that take one."""
    use_activation: bool | None = None
    """Outputs go through softmax or sigmoid. null: as the model's config says."""


class CohereRerankBody(RerankBody):
    """The body of POST /v2/rerank, as Cohere has it. Texts that are too long are cut, and documents
    are not sent back."""

    return_documents: bool = False
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = 4096
    truncate_prompt_tokens: int | None = -1


class CohereEmbedBody(EngineBody):
    """The body of POST /v1/embed and /v2/embed."""

    verdicts = POOLING
    model_config = examples({"texts": ["Once upon a time"]})

    texts: Texts
    """The texts, at least one."""
    input_type: (
        Literal["search_query", "search_document", "classification", "clustering"] | None
    ) = None
    """The use of the vectors, for checkpoints with a prompt for it."""
    embedding_types: Items[CohereType] | None = None
    """Types of numbers that vectors come in. null: float."""
    output_dimension: int | None = None
    """Dimensions that vectors are cut to, for models that allow it."""
    truncate: Literal["NONE", "END"] = "END"
    """"END" cuts texts that are too long. With "NONE" they are an error."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longer texts are cut to so many tokens. With `truncate` NONE they are an error."""

    def params(self) -> PoolingParams:
        return PoolingParams(task="embed", dimensions=self.output_dimension)

    def most_tokens(self, max_model_len: int) -> int | None:
        """The value of `truncate_prompt_tokens`: most tokens of a text. None where longer ones are
        an error."""
        return (
            None
            if self.truncate == "NONE"
            else min(self.max_tokens or max_model_len, max_model_len)
        )

    def check_lengths(self, names: Sequence[str], outputs: Sequence[PoolingRequestOutput]) -> None:
        """Raises ContextLengthError for a text that is longer than `max_tokens` and was not cut."""
        if self.max_tokens is None:
            return
        for name, output in zip(names, outputs, strict=True):
            if (length := len(output.prompt_token_ids)) > self.max_tokens:
                raise ContextLengthError(
                    f"{name}: the text has {length} tokens, but max_tokens is {self.max_tokens} "
                    "and truncate is NONE.",
                    "texts",
                )


def read_inputs(value: Any, most: int) -> Inputs:
    """The inputs in `value`: one text, one list of token ids, or a list of both. Raises
    RequestError."""
    if isinstance(value, str | dict):
        return Inputs([_input(value, "input")], ["input"])
    _check_list(value, "input", most=None)
    if all(type(item) is int for item in value):
        return Inputs([TokensPrompt(prompt_token_ids=value)], ["input"])
    _check_list(value, "input", most)
    names = [f"input[{index}]" for index in range(len(value))]
    if type(value[0]) is int:
        wrong = next(index for index, item in enumerate(value) if type(item) is not int)
        raise RequestError(
            f"input[{wrong}] is of another kind: a list that begins with a token id is one input, "
            "of token ids.",
            "input",
        )
    return Inputs([_input(item, name) for item, name in zip(value, names, strict=True)], names)


def _input(item: Any, name: str) -> Prompt:
    """One of several inputs."""
    if isinstance(item, str):
        return item
    if isinstance(item, dict):
        media: Any = _media(item, name, "input")
        return cast(Prompt, media)
    if not isinstance(item, list):
        raise RequestError(
            f"{name} is of another kind: it must be a text, or a list of token ids.", "input"
        )
    if not all(type(token) is int for token in item):
        raise RequestError(f"{name} must be a list of token ids.", "input")
    return TokensPrompt(prompt_token_ids=item)


def _has_roles(value: Any) -> bool:
    """Whether inputs are messages, or conversations, as vLLM takes them: the first has a role."""
    for _ in range(2):
        value = value[0] if isinstance(value, list) and value else value
    return isinstance(value, dict) and "role" in value


def read_conversations(value: Any, name: str, most: int) -> dict[str, list[dict[str, Any]]]:
    """Conversations by their names in errors: `value` is one, or a list of them. Raises
    RequestError."""
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list of messages, or of conversations.", name)
    kind = list if value and isinstance(value[0], list) else dict
    for index, item in enumerate(value):
        if not isinstance(item, kind):
            other = "a message" if kind is dict else "a list of messages"
            raise RequestError(
                f"{name}[{index}] is of another kind: it must be {other}, as those before it.", name
            )
    if kind is dict:
        return {name: value}
    _check_list(value, name, most)
    for index, messages in enumerate(value):
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise RequestError(
                f"{name}[{index}] must be a list of messages, with at least one.", name
            )
    return {f"{name}[{index}]": messages for index, messages in enumerate(value)}


def read_texts(value: Any, name: str, most: int) -> list[str]:
    """The texts in `value`: one, or a list of them. {"text": text} is a text, too. Raises
    RequestError."""
    if isinstance(value, str):
        return [value]
    _check_list(value, name, most)
    texts = [
        item["text"] if isinstance(item, dict) and set(item) == {"text"} else item for item in value
    ]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(f'{name}[{index}] must be a text, or {{"text": text}}.', name)
    return texts


def read_documents(value: Any, name: str, most: int) -> list[Scored]:
    """The texts in `value`, and prompts with media: one, or a list of them. Raises RequestError."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, str):
        return [value]
    _check_list(value, name, most)
    found: list[Scored] = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            found.append(_media(item, f"{name}[{index}]", name))
        else:
            raise RequestError(f"{name}[{index}] {_FORMS}", name)
    return found


def _media(item: Media, label: str, param: str) -> Scored:
    """A text, or a prompt with media, that a mapping stands for. Raises RequestError."""
    match item:
        case {"text": str(text)} if len(item) == 1:
            return text
        case {"image": str(url)} if len(item) == 1:
            return {"content": [{"type": "image_url", "image_url": {"url": url}}]}
        case {"content": str(text)} if len(item) == 1:
            return text
        case {"content": list(parts)} if len(item) == 1 and parts:
            return {"content": parts}
    raise RequestError(f"{label} {_FORMS}", param)


def _check_list(value: Any, name: str, most: int | None) -> None:
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a text or a list.", name)
    if not value:
        raise RequestError(f"{name} is an empty list: give at least one.", name)
    if most is not None and len(value) > most:
        raise RequestError(
            f"{name} has {len(value)} items; this server takes at most {most} in one request "
            "(max_inputs). Send them in several requests.",
            name,
        )


def encodings(types: Sequence[CohereType] | None) -> list[CohereType]:
    """The types that Cohere's `embedding_types` asks for, each once."""
    return list(dict.fromkeys(types or ["float"]))
