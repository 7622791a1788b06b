"""Request bodies: OpenAI's fields, and those that vLLM adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema
from toolkit_lm.errors import PluginError, RequestError
from toolkit_lm.params import SAMPLING_PARAMS, RequestOutputKind, SamplingParams
from toolkit_lm.plugin import LogitsProcessorRegistry

from toolkit_lm_server.caller import CALLER
from toolkit_lm_server.fields import Items, parameter_fields
from toolkit_lm_server.json_body import ManyItems
from toolkit_lm_server.message_schemas import AnyMessage, AnyTool
from toolkit_lm_server.request_fields import (
    CHAT,
    COMMON,
    SAMPLING,
    STREAM_OPTIONS,
    Verdicts,
    described_others,
)
from toolkit_lm_server.schema_texts import Described
from toolkit_lm_server.unknown_fields import kept_fields

if TYPE_CHECKING:
    from toolkit_lm.processing import RequestOptions


def examples(*bodies: dict[str, Any]) -> ConfigDict:
    """The model config that shows examples of a body in the description of the API."""
    return ConfigDict(json_schema_extra={"examples": [*bodies]})


class PlainBody(Described):
    """A JSON object. Values are taken as they are: "1" is not a number, and true is not an
    integer."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    verdicts: ClassVar[Verdicts] = COMMON
    """Rules for fields that other projects have and this body has not."""
    dropped: ClassVar[frozenset[str]] = frozenset()
    """Fields of the body that count as absent where their value changes nothing."""
    nested: ClassVar[Mapping[str, tuple[tuple[str, ...], Verdicts]]] = {}
    """Rules for fields that are objects: the names that are read of each, and what becomes of
    others."""

    plain: ClassVar[frozenset[str]] = frozenset()
    """Fields whose content is not checked for unknown names."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        resolved = handler.resolve_ref_schema(schema)
        stated = resolved["properties"]
        resolved["properties"] = {**described_others(cls.verdicts, stated), **stated}
        return schema

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Raises TypeError where a rule renames to a field that the body does not have."""
        cls.plain = frozenset(cls.model_fields.keys() - cls.verdicts.keys())
        for name, verdict in cls.verdicts.items():
            if verdict.becomes == "renamed" and verdict.note not in cls.model_fields:
                raise TypeError(
                    f"{cls.__name__}: {name!r} is another name of {verdict.note!r}, which is no "
                    "field of this body."
                )

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = data
        if not data.keys() <= cls.plain:
            kept = kept_fields(data, cls.model_fields, cls.verdicts, dropped=cls.dropped)
        for name, (stated, verdicts) in cls.nested.items():
            if isinstance(value := kept.get(name), dict):
                inner = kept_fields(value, stated, verdicts, inside=f"{name}.")
                kept = {**kept, name: inner}
        return {
            name: value for name, value in kept.items() if not _stands_for_default(cls, name, value)
        }


class Body(PlainBody):
    """A JSON object that asks a model."""

    model: str | None = None
    """The model to ask. None: the model that is served."""


def _stands_for_default(cls: type[BaseModel], name: str, value: Any) -> bool:
    """Whether a value stands for the default: null where a field may be left out, and false where
    true has no effect."""
    field = cls.model_fields[name]
    return not field.is_required() and (
        value is None or (value is False and not _takes_bool(field.annotation))
    )


def _takes_bool(kind: Any) -> bool:
    return kind in (bool, Any) or (
        get_origin(kind) in (Union, UnionType, Annotated) and any(map(_takes_bool, get_args(kind)))
    )


def _as_switch(value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


class StreamOptions(Described):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False
    """The last event of a stream has the usage."""
    continuous_usage_stats: bool = False
    """Each event of a stream has the usage so far."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = kept_fields(data, cls.model_fields, STREAM_OPTIONS, inside="stream_options.")
        return {name: value for name, value in kept.items() if value is not None}


# Core checks these bounds, and words their errors.
_PRIORITY = {"type": "integer", "minimum": 1 - 2**63, "maximum": 2**63 - 1}
_TIMEOUT = {"type": "number", "exclusiveMinimum": 0, "maximum": 10**9}
_SALT = {"type": "string", "minLength": 1, "maxLength": 1024}


class EngineBody(Body):
    """Fields that tell the engine how to handle the requests."""

    priority: Annotated[int, WithJsonSchema(_PRIORITY)] = 0
    """Requests with a smaller number are scheduled first, where the scheduling policy reads it."""
    timeout: Annotated[float, WithJsonSchema(_TIMEOUT)] | None = None
    """Seconds after which the request ends with the tokens that it has."""
    cache_salt: Annotated[str, WithJsonSchema(_SALT)] | None = None
    """Only requests with the same salt share cached prefixes."""

    def request_options(self, context: dict[str, str]) -> RequestOptions:
        """The options of the engine's requests. `context`: facts of the HTTP request for plugins
        that watch the engine."""
        return {
            "priority": self.priority,
            "timeout": self.timeout,
            "cache_salt": self.cache_salt,
            "context": context,
        }


_TOLD = 5
"""Most wrong keys of a mapping that an error names."""

_FIELDS = parameter_fields(SAMPLING_PARAMS)


_SamplingFields: Any = create_model("SamplingFields", __base__=EngineBody, **_FIELDS)


class SamplingBody(_SamplingFields):  # type: ignore[misc]
    """The sampling parameters, which chat and plain completions share."""

    verdicts: ClassVar[Verdicts] = SAMPLING
    dropped = frozenset({"reasoning_effort", "response_format", "suffix"})

    plugin_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters of plugins' logits processors."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of sampling parameters that the body leaves out."""
    may_cut_ends: ClassVar[bool] = False
    """Prompts may be cut at their end."""
    forces_usage: ClassVar[bool] = False
    """Streams tell usage in each event, even unasked."""

    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description=SAMPLING_PARAMS["seed"].help
    )
    stream: bool | None = None
    """The answer comes as server-sent events, as it is generated."""
    stream_options: StreamOptions | None = None
    """Options of a stream."""
    return_token_ids: bool = False
    """The answer has the token ids of prompts and outputs, too."""
    return_tokens_as_token_ids: bool = False
    """Log probabilities name tokens by id, "token_id:7". Texts of tokens may be alike."""
    timings: bool = False
    """The answer has the times of its prompt and of its tokens, in llama.cpp's shape. In a stream,
    each event that has tokens tells them so far."""
    truncation_side: Literal["left", "right"] | None = None
    """The side at which prompts are cut. "right" is for plain completions. None means "left"."""
    n_predict: int | None = None
    """Most output tokens, llama.cpp's name of max_tokens. -1: as many as fit."""

    def most_tokens(self, default: int | None) -> int | None:
        """Most output tokens. None: as many as fit. `default`: the value where the body says
        nothing."""
        if self.n_predict is None:
            return default if self.max_tokens is None else self.max_tokens
        return None if self.n_predict < 0 else self.n_predict

    def sampling_params(self, **more: Any) -> SamplingParams:
        """The sampling parameters of the body. Raises RequestError for a value out of range."""
        if self.truncation_side == "right" and not self.may_cut_ends:
            raise RequestError(
                "truncation_side right is for plain completions: other prompts are cut at their "
                "beginning.",
                "truncation_side",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is allowed only when stream is true.", "stream_options"
            )
        if self.logprob_token_ids is not None and more.get("logprobs") is None:
            raise RequestError(
                "logprob_token_ids is allowed only with logprobs.", "logprob_token_ids"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs is allowed only when stream is false.", "prompt_logprobs"
            )
        stated = {
            name: value
            for name in _FIELDS
            if name != "max_tokens" and (value := getattr(self, name)) is not None
        }
        if not self.use_beam_search:
            stated = {**self.defaults, **stated}
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        extra = {
            name: value for name in self.plugin_fields if (value := getattr(self, name)) is not None
        }
        if self.use_beam_search and extra:
            name = next(iter(extra))
            raise RequestError(
                f"{name} has no effect with use_beam_search, which draws no tokens: leave one of "
                "them out.",
                name,
            )
        params = SamplingParams(
            **{
                **stated,
                "logit_bias": self._logit_bias(),
                "extra_args": extra or None,
                "output_kind": kind,
                **more,
            }
        )
        if params.ranks and self.stream:
            name = "use_beam_search" if params.use_beam_search else "best_of"
            raise RequestError(
                f"{name} is allowed only when stream is false: which sequences are the best is "
                "known at the end.",
                name,
            )
        return params

    def _logit_bias(self) -> dict[int, float] | None:
        wrong = [
            key
            for key in self.logit_bias or {}
            if not (key.isascii() and key.isdigit() and len(key) < 12)
        ]
        if wrong:
            shown = ", ".join(repr(key[:20]) for key in wrong[:_TOLD])
            raise RequestError(
                f"logit_bias maps token ids to numbers; not a token id: {shown}.", "logit_bias"
            )
        return (
            None
            if self.logit_bias is None
            else {int(key): value for key, value in self.logit_bias.items()}
        )

    @property
    def include_usage(self) -> bool:
        return self.forces_usage or (
            self.stream_options is not None and self.stream_options.include_usage
        )

    def usage_so_far(self, usage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The usage field of a stream's events before the last. `usage` gives the token counts so
        far."""
        if not self.include_usage:
            return {}
        has_usage = self.forces_usage or (
            self.stream_options is not None and self.stream_options.continuous_usage_stats
        )
        return {"usage": usage() if has_usage else None}


BodyT = TypeVar("BodyT", bound=SamplingBody)


def body_of(
    body: type[BodyT],
    processors: LogitsProcessorRegistry,
    defaults: Mapping[str, Any],
    forces_usage: bool = False,
) -> type[BodyT]:
    """A subclass of `body` with a field for each parameter of plugins' logits processors, and with
    the model's sampling defaults.

    Raises PluginError for a parameter with the name of a field.
    """
    for entry in processors.entries():
        if taken := [
            name
            for name in entry.params.__struct_fields__
            if name in body.model_fields.keys() - SAMPLING_PARAMS.keys()
        ]:
            raise PluginError(
                f"{entry.owner}: logits processor {entry.key!r}: {taken[0]!r} is a field of HTTP "
                "requests already."
            )
    made: type[BodyT] = create_model(
        body.__name__, __base__=body, **parameter_fields(processors.params)
    )
    made.__doc__ = body.__doc__
    made.plugin_fields = tuple(processors.params)
    made.defaults = defaults
    made.forces_usage = forces_usage
    return made


class RenderBody(Body):
    """Fields that tell how a conversation is rendered."""

    add_generation_prompt: bool | None = None
    """The prompt ends where an answer of the assistant's begins. The default is true for chats."""
    continue_final_message: bool = False
    """The answer goes on with the last message, which the prompt leaves open."""
    add_special_tokens: bool | None = None
    """The tokenizer adds its special tokens. The default is true for a text, and false for a
    conversation, whose template writes them."""
    documents: Items[dict[str, Any]] | None = None
    """Documents for the chat template, where it takes any."""
    chat_template: str | None = None
    """A chat template in place of the model's, where the server allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the checkpoint's processor of images and other media."""

    def refuse_render_options(self) -> None:
        """Raises RequestError for options of rendering in a body without a conversation."""
        for name in (
            "continue_final_message",
            "documents",
            "chat_template",
            "chat_template_kwargs",
            "mm_processor_kwargs",
            "tools",
        ):
            if getattr(self, name, None):
                raise RequestError(
                    f"{name} is for messages: a text goes through no chat template.", name
                )

    def render_options(self) -> dict[str, Any]:
        """Keywords of Renderer.render_conversation. Raises RequestError for a template that the
        server does not allow."""
        if self.chat_template is not None and not CALLER.get().takes_templates:
            message = (
                "the server takes no chat_template of requests. Use chat_template_kwargs, or ask "
                "the operator to allow it (allow_request_chat_template)."
            )
            raise RequestError(message, "chat_template")
        options: dict[str, Any] = {
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        for name in (
            "add_generation_prompt",
            "add_special_tokens",
            "documents",
            "chat_template",
            "mm_processor_kwargs",
        ):
            if (value := getattr(self, name)) is not None:
                options[name] = value
        return options


class ChatBody(SamplingBody, RenderBody):
    """The body of POST /v1/chat/completions."""

    model_config = examples(
        {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 8,
        },
        {
            "messages": [{"role": "user", "content": "What is the capital of Italy?"}],
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
        },
    )

    verdicts = CHAT

    messages: ManyItems[AnyMessage]
    """The conversation, the oldest message first."""
    max_completion_tokens: int | None = None
    """Most output tokens, OpenAI's newer name of max_tokens. null: as many as fit."""
    echo: bool = False
    """The answer begins with the last message where that is the assistant's."""
    tools: Items[AnyTool] | None = None
    """Functions that the model may call, as OpenAI has them."""
    tool_choice: str | dict[str, Any] | None = None
    """The tools to call: "none", "auto", "required", a function, or allowed_tools."""
    parallel_tool_calls: bool | None = None
    """False limits an answer to one call."""
    verbosity: str | None = None
    """The length of answers, for a chat template that reads it: "low", "medium" or "high"."""
    service_tier: str | None = None
    """The tier that is asked for. All requests are served in the tier "default", which the answer
    tells."""
    reasoning_effort: str | None = None
    """The effort that the chat template gets. "none" turns thinking off, like enable_thinking
    false."""
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""
    logprobs: Annotated[bool, BeforeValidator(_as_switch)] | None = None
    """Whether log probabilities are told. The texts "true" and "false" are taken, too: vLLM's
    clients send them."""
    top_logprobs: int | None = None
    """Alternatives that log probabilities tell for each token. -1: the whole vocabulary."""

    def conversations(self, most: int) -> list[list[dict[str, Any]]]:
        """The conversations to answer, at most `most`. Raises RequestError for more."""
        return [self.messages]

    def template_kwargs(self) -> dict[str, Any] | None:
        """Variables of the chat template, beside messages and tools."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        effort: dict[str, Any] = {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort = {"enable_thinking": False}
        return effort | (self.chat_template_kwargs or {})

    def render_options(self) -> dict[str, Any]:
        options = super().render_options()
        return (
            options
            if self.reasoning_effort is None
            else options | {"chat_template_kwargs": self.template_kwargs()}
        )

    def structures(self, names: Sequence[str]) -> dict[str, Any]:
        """The parameters among `names` that the body gives."""
        return {name: value for name in names if (value := getattr(self, name, None)) is not None}

    def params(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "top_logprobs is allowed only when logprobs is true.", "top_logprobs"
            )
        most = self.most_tokens(self.defaults.get("max_tokens"))
        max_tokens = most if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling_params(
            max_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None
        )
