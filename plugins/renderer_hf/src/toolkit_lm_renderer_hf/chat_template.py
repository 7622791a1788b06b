"""Chat templates: found in the checkpoint or given by the operator, rendered in a sandbox as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace
from toolkit_lm.errors import CheckpointError, ConfigError, ContextLengthError, RequestError
from toolkit_lm.prompts import Conversation

from toolkit_lm_renderer_hf.bounded import MOST_SOURCE, BoundedEnvironment, SlowTemplateError, rendering
from toolkit_lm_renderer_hf.tokenizer import read_json
from toolkit_lm_renderer_hf.tool_calls import takes_text, with_calls

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "dict"})
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_PROBE = "probe-of-content"
_PROBE_PART = {"type": "text", "text": _PROBE}


class ChatTemplate:
    """The chat template of a checkpoint, or several by name: "tool_use" is taken where a conversation has tools, else "default".

    Raises `error` for one that does not parse: ConfigError where it is the operator's, CheckpointError where it is the checkpoint's.
    `is_of_request`: one that takes too long to try is refused, so that nobody waits for each trial.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        error: Callable[[str], Exception] = CheckpointError,
        *,
        is_of_request: bool = False,
    ) -> None:
        self._is_of_request = is_of_request
        environment = _environment()
        self.source = "\n".join(sources[name] for name in ("default", "tool_use") if name in sources)
        """Of the templates that conversations are rendered by."""
        self._sources = sources
        self._special_tokens = special_tokens
        self._templates = {name: _compile(environment, source, error) for name, source in sources.items()}
        self._takes_parts = {name: self._probe(name) for name in sources}
        self._takes_calls_as_text = {
            name: "tool_calls" in source and takes_text(partial(self._renders, name)) for name, source in sources.items()
        }
        self._takes_media: dict[str, bool] = {}
        self._media_texts: Mapping[str, str] = {}

    @cached_property
    def names(self) -> frozenset[str]:
        """Those that any of the templates reads."""
        environment = _environment()
        trees = [environment.parse(source) for source in self._sources.values()]
        return frozenset(name for tree in trees for name in meta.find_undeclared_variables(tree))

    def take_media(self, tokens: Mapping[str, str], texts: Mapping[str, str]) -> None:
        """For conversations with items of media: by modality its placeholder, and what stands for it where a template writes none."""
        self._media_texts = texts
        for name in self._templates:
            parts = [{"type": modality} for modality in tokens]
            self._takes_media[name] = any(self._writes(name, [part, _PROBE_PART], tokens[part["type"]]) for part in parts)

    def render(
        self,
        messages: Conversation,
        *,
        max_length: int,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        hide: Callable[[str], str] = str,
    ) -> str:
        """The conversation as one text of at most `max_length` characters. `hide` is applied to all texts in it. Raises RequestError."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                f"the checkpoint has no chat template named {name!r}, only: {', '.join(sorted(self._templates))}.", "messages"
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise RequestError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "continue_final_message")
        extra = _plain(chat_template_kwargs or {}, "chat_template_kwargs", hide)
        for key in extra:
            if key in _RESERVED:
                raise RequestError(f"chat_template_kwargs cannot set {key!r}.", "chat_template_kwargs")
        form = _Form(self._takes_parts[name], self._takes_media.get(name, False), self._media_texts, hide, self._takes_calls_as_text[name])
        chat = [form.message(message) for message in messages]
        if not chat:
            raise RequestError("the conversation is empty: give at least one message.", "messages")
        final = _tag_final(chat) if continue_final_message else None
        names = {
            "messages": chat,
            "tools": _plain(tools, "tools", hide),
            "documents": _plain(documents, "documents", hide),
            "add_generation_prompt": add_generation_prompt,
            **extra,
        }
        text = self._run(name, names, max_length + len(_CONTINUE_TAG))
        return text if final is None else _cut_final(text, final)

    def _run(self, name: str, names: Mapping[str, Any], max_length: int) -> str:
        chunks: list[str] = []
        length = 0
        try:
            with rendering(max_length):
                for chunk in self._templates[name].generate({**self._special_tokens, **names}):
                    chunks.append(chunk)
                    length += len(chunk)
                    if length > max_length:
                        raise ContextLengthError(
                            f"the conversation makes a text of more than {max_length} characters; longer ones are not tokenized.",
                            "messages",
                        )
        except RequestError:
            raise
        except SecurityError as error:
            raise RequestError(f"the chat template tried what its sandbox forbids: {error}", "messages") from error
        except TemplateError as error:
            raise RequestError(f"the chat template refuses this conversation: {error}", "messages") from error
        except Exception as error:  # a template can raise whatever its expressions raise
            raise RequestError(f"the chat template cannot render this conversation: {type(error).__name__}: {error}", "messages") from error
        return "".join(chunks)

    def _probe(self, name: str) -> bool:
        """True where the template writes a text only when `content` is a list of parts."""

        return not self._writes(name, _PROBE) and self._writes(name, [_PROBE_PART])

    def _renders(self, name: str, messages: list[dict[str, Any]]) -> bool:
        names = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        return self._tried(name, names) is not None

    def _writes(self, name: str, content: Any, mark: str = "") -> bool:
        """Whether the template writes the text of a user's content, and a mark."""
        names = {"messages": [{"role": "user", "content": content}], "tools": None, "documents": None, "add_generation_prompt": True}
        text = self._tried(name, names)
        return text is not None and _PROBE in text and mark in text

    def _tried(self, name: str, names: Mapping[str, Any]) -> str | None:
        """What the template makes of it; None where it refuses."""
        try:
            return self._run(name, names, 10**6)
        except SlowTemplateError:
            if self._is_of_request:
                raise
        except RequestError:
            pass
        return None


def find_chat_template(
    option: str | None, folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The operator's template (a text, or the path of a file), else the checkpoint's; None where there is none.

    Raises ConfigError or CheckpointError.
    """
    if option is not None:
        return ChatTemplate({"default": _read_option(option)}, special_tokens, ConfigError)
    found: Any
    if (path := folder / "chat_template.jinja").is_file():
        found = _read(path)
    else:
        found = tokenizer_config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if not found:
        return None
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {str(one["name"]): one.get("template") for one in found if isinstance(one, dict) and "name" in one}
    if not found or not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise CheckpointError(f"{folder}: chat_template must be a text, or a list of objects with a name and a template.")
    return ChatTemplate(found, special_tokens)


def _read(path: Path) -> str:
    """Of a file that is too long, only so much that this shows."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MOST_SOURCE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _compile(environment: BoundedEnvironment, source: str, error: Callable[[str], Exception]) -> Template:
    if len(source) > MOST_SOURCE:
        raise error(f"the chat template is too long: it may have {MOST_SOURCE} characters.")
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as failure:
        raise error(f"the chat template does not parse: line {failure.lineno}: {failure.message}") from failure
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as failure:
        raise error(f"the chat template cannot be compiled: {type(failure).__name__}: {failure}") from failure


def _read_option(option: str) -> str:
    if "{{" in option or "{%" in option:
        return option
    try:
        return Path(option).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {option!r} is neither a Jinja template nor a file that can be read: {error}") from error


class _Form(NamedTuple):
    """The form of messages that a template takes."""

    takes_parts: bool
    """Contents are lists of parts."""
    takes_media: bool
    """Contents are texts, or lists of parts where they are given as such; and it writes the placeholders of media."""
    media_texts: Mapping[str, str]
    """What stands for an item in a text. None of any modality: there are no items."""
    hide: Callable[[str], str]
    takes_calls_as_text: bool
    """Arguments of tool calls are the text of JSON."""

    def message(self, message: Any) -> dict[str, Any]:
        """`message` as plain data. Keys without a value are left out, as in transformers."""
        if not isinstance(message, Mapping):
            raise RequestError(f"a message must be a mapping with 'role' and 'content', not a {type(message).__name__}.", "messages")
        if message.get("tool_calls"):
            message = with_calls(message, as_text=self.takes_calls_as_text)
        plain = {key: value for key, value in _plain(message, "messages", self.hide).items() if value is not None}
        if not isinstance(plain.get("role"), str):
            raise RequestError("a message must have a 'role', such as 'user', 'assistant' or 'system'.", "messages")
        content = plain.get("content")
        if isinstance(content, list):
            parts = [self._part(part) for part in content]
            plain["content"] = parts if self.takes_parts or self.takes_media else "\n".join(map(self._text, parts))
        elif isinstance(content, str):
            plain["content"] = [{"type": "text", "text": content}] if self.takes_parts else content
        elif content is not None:
            raise RequestError(f"a message's content must be a text or a list of parts, not a {type(content).__name__}.", "messages")
        return plain

    def _part(self, part: Any) -> dict[str, str]:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if isinstance(part, dict) and isinstance(kind, str) and kind in self.media_texts:
            # One that writes parts, and nothing for media, has the placeholder from here.
            return {"type": kind} if self.takes_media or not self.takes_parts else {"type": "text", "text": self.media_texts[kind]}
        if kind != "text":
            known = f"text and {', '.join(self.media_texts)}" if self.media_texts else "text only"
            raise RequestError(f"this model takes {known}, not content of type {kind!r:.100}.", "messages")
        if not isinstance(part.get("text"), str):
            raise RequestError("a content part of type 'text' must have a 'text'.", "messages")
        return {"type": "text", "text": str(part["text"])}

    def _text(self, part: Mapping[str, str]) -> str:
        return part["text"] if part["type"] == "text" else self.media_texts[part["type"]]


def _plain(value: Any, param: str, hide: Callable[[str], str]) -> Any:
    """A copy of `value` made of JSON types only: a template must not reach methods of the caller's objects."""
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, str):
        return hide(str.__str__(value))
    if isinstance(value, Mapping):
        return {hide(str(key)): _plain(item, param, hide) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, param, hide) for item in value]
    raise RequestError(f"{param} must hold JSON values only, not a {type(value).__name__}.", param)


def _tag_final(chat: list[dict[str, Any]]) -> str:
    content = chat[-1].get("content")
    if not content:
        raise RequestError("continue_final_message needs a final message with content to continue.", "continue_final_message")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
        return content
    final: str | None = content[-1].get("text")
    if not final:
        raise RequestError("continue_final_message needs a final message that ends with a text to continue.", "continue_final_message")
    content[-1]["text"] = final + _CONTINUE_TAG
    return final


def _cut_final(text: str, final: str) -> str:
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "the chat template does not write the final message as it is, so it cannot be continued.", "continue_final_message"
        )
    # A template that trims messages has eaten the tag's space, and would have eaten the message's own.
    return text[:at] if text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG else text[:at].rstrip()


class _Generation(Extension):
    """{% generation %} marks the assistant's own text for training; here it writes its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict` for templates, without the type's other methods."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace` for templates, without underscore names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Positional only, as in Jinja, so that a template can say namespace(self=...).
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __repr__(self) -> str:
        # Namespaces in namespaces would have a text of any length.
        return "<Namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the underscore name {name!r}.")


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.add_filter("tojson", _tojson)
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.globals.update(functions)
    return environment


def _tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes HTML characters, which prompts must not have.
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        return encoder.encode(x)
    # Indentation can be far longer than what is indented: it is counted piece by piece.
    return "".join(BoundedEnvironment.budget().meter(encoder.iterencode(x)))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > 100:
        raise TemplateError("a format of a time has at most 100 characters.")
    return datetime.now().strftime(format)
