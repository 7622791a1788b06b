"""Request bodies of Ollama's routes, and their translation to chats or completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import SkipValidation
from toolkit_lm.errors import RequestError
from toolkit_lm_server.errors import printable
from toolkit_lm_server.fields import Items
from toolkit_lm_server.json_body import ManyItems
from toolkit_lm_server.protocol import EngineBody, examples
from toolkit_lm_server.request_fields import COMMON, Verdicts, idle, refused, sampling_parameters

from toolkit_lm_vendor_apis.arguments import dumps
from toolkit_lm_vendor_apis.images import image_part

_OPTIONS = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "draft_num_predict": "max_draft_tokens",
    **{
        name: name
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "typical_p",
            "seed",
            "stop",
            "presence_penalty",
            "frequency_penalty",
            "mirostat",
            "mirostat_tau",
            "mirostat_eta",
        )
    },
}
"""Options that say how to draw tokens."""
_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")
OPTIONS: Verdicts = {
    **idle(
        "it configures how Ollama runs a model; here the server's options do",
        "numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv kv_cache_type logits_all "
        "vocab_only use_mmap use_mlock num_thread "
        "num_keep embedding_only",
    ),
    **refused("penalties cover the whole context (-1)", "repeat_last_n", -1, qualifies=_PENALTIES),
    **refused("penalties apply to all tokens", "penalize_newline", True),
    **refused("use top_p, min_p or typical_p", "tfs_z", 1),
}
"""Treatment of all other options."""
VERDICTS: Verdicts = {
    **COMMON,
    **sampling_parameters("write it into options"),
    **idle(
        "a prompt that is too long is refused, and an answer that reaches the end has the "
        "done_reason length",
        "truncate shift",
    ),
    **refused("ask /v1/chat/completions", "logprobs top_logprobs", 0),
    **idle("the model stays loaded", "keep_alive"),
    **refused("answers are texts", "width height steps"),
    **refused("prompts are not returned", "_debug_render_only"),
}
"""Treatment of all other fields."""
NAMES = {
    "response_format": "format",
    "chat_template_kwargs.enable_thinking": "think",
    "reasoning_effort": "think",
    **{ours: f"options.{theirs}" for theirs, ours in _OPTIONS.items()},
}
"""Names in Ollama's API, by field of chat completions."""
_TAG = ":latest"


class NamedModel(EngineBody):
    """Fields that all routes take."""

    verdicts: ClassVar[Verdicts] = {
        **VERDICTS,
        **idle("the model card has everything", "system template verbose"),
    }
    nested = {"options": ((), {**OPTIONS, **idle("no token is sampled", " ".join(_OPTIONS))})}

    options: dict[str, Any] | None = None
    """Sampling parameters, by Ollama's names."""

    @property
    def name(self) -> str | None:
        """The model, without the tag that Ollama's clients add."""
        return None if self.model is None else self.model.removesuffix(_TAG)

    def engine_fields(self) -> dict[str, Any]:
        """Fields that chats and completions have, too."""
        fields = {
            "model": self.name,
            "priority": self.priority,
            "timeout": self.timeout,
            "cache_salt": self.cache_salt,
        }
        return {name: value for name, value in fields.items() if value is not None}


class _Generating(NamedModel):
    verdicts = VERDICTS
    nested = {"options": (tuple(_OPTIONS), OPTIONS)}

    format: str | dict[str, Any] | None = None
    """"json", or a JSON schema."""
    stream: bool = True
    """The answer comes as lines of JSON, as it is generated."""
    think: bool | str | None = None
    """Whether the model reasons, or with which effort. False: reasoning is not shown."""

    def _fields(self) -> dict[str, Any]:
        # Whoever does not want a stream wants its durations.
        fields = self.engine_fields() | {"stream": True}
        for theirs, ours in _OPTIONS.items():
            value = (self.options or {}).get(theirs)
            # -1 and -2: as many tokens as there is room for. 0: all tokens.
            if (
                value is not None
                and not (theirs == "num_predict" and value in (-1, -2))
                and not (theirs == "top_k" and value == 0)
            ):
                fields[ours] = value
        match self.format:
            case None | "":
                pass
            case "json":
                fields["response_format"] = {"type": "json_object"}
            case dict(schema):
                fields["response_format"] = {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": schema, "strict": True},
                }
            case _:
                raise RequestError('format must be "json" or a JSON schema.', "format")
        return fields

    def _thinking(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"chat_template_kwargs": {"enable_thinking": self.think is not False}, **effort}


class OllamaChatBody(_Generating):
    """POST /api/chat."""

    model_config = examples(
        {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "options": {"num_predict": 8},
        },
        {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "options": {"num_predict": 8},
            "stream": False,
        },
    )

    messages: ManyItems[dict[str, Any]] = []
    """Messages of the chat. An empty list only asks to load the model, which is loaded already."""
    tools: Items[dict[str, Any]] | None = None
    """Functions that the model may call, as OpenAI has them."""

    def chat(self) -> dict[str, Any]:
        """The fields of a chat completion. Raises RequestError."""
        fields = self._fields() | self._thinking() | ({"tools": self.tools} if self.tools else {})
        calls = _Calls()
        return fields | {
            "messages": [
                calls.message(message, f"messages[{index}]")
                for index, message in enumerate(self.messages)
            ]
        }


class GenerateBody(_Generating):
    """POST /api/generate."""

    model_config = examples(
        {"prompt": "Once upon a time", "options": {"num_predict": 8}},
        {"prompt": "Once", "raw": True, "stream": False},
    )

    verdicts = {**VERDICTS, **refused("use /api/chat, or raw", "template context")}

    prompt: str = ""
    """Without one, the model is loaded, which it is."""
    system: str | None = None
    """A system message before the prompt."""
    images: Items[str] | None = None
    """Images of the prompt, in base64."""
    raw: bool = False
    """The prompt is taken as it is, without the chat template."""
    suffix: str | None = None
    """Text that follows the answer, for models that fill in the middle."""

    def chat(self) -> dict[str, Any]:
        """The fields of a chat completion. Raises RequestError."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        user = {"role": "user", "content": self.prompt} | (
            {"images": self.images} if self.images else {}
        )
        return (
            self._fields()
            | self._thinking()
            | {"messages": [*messages, _Calls().message(user, "prompt")]}
        )

    def completion(self, longest: int) -> dict[str, Any]:
        """The fields of a plain completion. `longest`: tokens that the model takes. Raises
        RequestError."""
        if self.images:
            raise RequestError(
                "images are for prompts that go through the chat template.", "images"
            )
        fields = self._fields()
        # Where nothing is said, Ollama goes on to the end.
        return {"max_tokens": longest, **fields, "prompt": self.prompt} | (
            {"suffix": self.suffix} if self.suffix else {}
        )


class EmbedBody(NamedModel):
    """POST /api/embed."""

    model_config = examples({"input": "Once upon a time"})

    input: Annotated[str | list[str], SkipValidation]
    """The text, or the texts."""
    truncate: bool = True
    """Texts that are too long are cut; else they are an error."""
    dimensions: int | None = None
    """Dimensions that vectors are cut to, for models that allow it."""


class OldEmbedBody(NamedModel):
    """POST /api/embeddings."""

    model_config = examples({"prompt": "Once upon a time"})

    prompt: str
    """The text."""


class ShowBody(NamedModel):
    """POST /api/show."""


class _Calls:
    """Messages as those of a chat: it knows calls by ids, Ollama by their order and the names of
    functions."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[tuple[str, str]] = []
        """Names and ids of calls without a result so far."""

    def message(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        """Raises RequestError."""
        made = {"role": message.get("role"), "content": message.get("content")}
        images = message.get("images")
        if images:
            if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
                raise RequestError(f"{where}: images must be a list of texts in base64.", "images")
            made["content"] = [
                {"type": "text", "text": made["content"] or ""},
                *map(image_part, images),
            ]
        if message.get("thinking"):
            made["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            made["tool_calls"] = self._calls(message["tool_calls"], where)
        if made["role"] == "tool":
            made["tool_call_id"] = message.get("tool_call_id") or self._id(message.get("tool_name"))
        return made

    def _calls(self, calls: Any, where: str) -> list[dict[str, Any]]:
        found = []
        for call in calls if isinstance(calls, list) else [None]:
            match call:
                case {"function": {"name": str(name), "arguments": dict(arguments)}}:
                    self._num_calls += 1
                    self._open.append((name, f"call_{self._num_calls}"))
                    function = {"name": name, "arguments": dumps(arguments)}
                    found.append(
                        {"id": self._open[-1][1], "type": "function", "function": function}
                    )
                case _:
                    raise RequestError(
                        f"{where}: tool_calls must have functions, each with a name and arguments.",
                        "messages",
                    )
        return found

    def _id(self, name: Any) -> str:
        """The first open call of this function."""
        place = next(
            (index for index, (known, _) in enumerate(self._open) if name in (None, known)), None
        )
        return f"call_{printable(str(name))}" if place is None else self._open.pop(place)[1]
