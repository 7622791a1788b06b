"""Chat templates: found in the checkpoint or given by the operator, rendered in a sandbox as
transformers renders them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, meta
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from toolkit_lm.errors import CheckpointError, ConfigError, ContextLengthError, RequestError
from toolkit_lm.prompts import Conversation

from toolkit_lm_renderer_hf.bounded import (
    MOST_SOURCE,
    BoundedEnvironment,
    OverBudgetError,
    rendering,
)
from toolkit_lm_renderer_hf.environment import make_environment
from toolkit_lm_renderer_hf.forms import REASONING, Plain, Sort, with_reasoning
from toolkit_lm_renderer_hf.tokenizer import read_json
from toolkit_lm_renderer_hf.trials import Trials

_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "raise_exception",
        "strftime_now",
        "namespace",
        "dict",
    }
)
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_MOST_TRIED = 10**6
"""Characters of a rendering without a request."""
_MOST_KNOWN = 1024
_LONGEST_KNOWN = 64
"""Conversations that are known to be written as they are, and messages of one."""
_REASONING = frozenset(REASONING)
_ROLES = frozenset({"system", "user", "assistant"})
_PROBE = "probe-of-content"
_PROBE_PART = {"type": "text", "text": _PROBE}


class ChatTemplate:
    """The chat template of a checkpoint, or several by name: "tool_use" is taken where a
    conversation has tools, else "default".

    Raises `error` for one that does not parse: ConfigError where it is the operator's,
    CheckpointError where it is the checkpoint's. What messages and tools must look like for it, it
    is asked when they come: see `trials`.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        error: Callable[[str], Exception] = CheckpointError,
    ) -> None:
        environment = make_environment()
        self.source = "\n".join(
            sources[name] for name in ("default", "tool_use") if name in sources
        )
        """Source of the templates that render conversations ("default" and "tool_use")."""
        self._sources = sources
        self._special_tokens = special_tokens
        self._templates = {
            name: _compile(environment, source, error) for name, source in sources.items()
        }
        self._trials = {
            name: Trials(partial(self._tried, name), source) for name, source in sources.items()
        }
        self._as_they_are: set[tuple[str, bool, tuple[str, ...]]] = set()
        """Templates, and roles of conversations of texts that they were found to write in full as
        they are."""
        self._media_tokens: Mapping[str, str] = {}
        self._media_texts: Mapping[str, str] = {}
        self._writes_media: dict[str, frozenset[str]] = {}

    @cached_property
    def writes_tools(self) -> bool:
        """It tells the model of tools that a conversation has."""
        name = self._name(True)
        with rendering(_MOST_TRIED):
            return name in self._trials and self._trials[name].writes_tools()

    @cached_property
    def names(self) -> frozenset[str]:
        """Variable names that any of the templates reads."""
        return frozenset().union(*self._names_of.values())

    @cached_property
    def _names_of(self) -> dict[str, frozenset[str]]:
        """Names of variables that a template reads and does not define, including built-in ones, by
        template."""
        environment = make_environment()
        trees = {name: environment.parse(source) for name, source in self._sources.items()}
        return {
            name: frozenset(meta.find_undeclared_variables(tree)) for name, tree in trees.items()
        }

    def set_media(self, tokens: Mapping[str, str], texts: Mapping[str, str]) -> None:
        """For conversations with items of media: by modality its placeholder, and what stands for
        it where a template writes none."""
        self._media_tokens = tokens
        self._media_texts = texts

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
        """The conversation as one text of at most `max_length` characters. `hide` is applied to all
        texts in it. Raises RequestError."""
        name = self._name(bool(tools))
        self._check(name, tools, documents)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise RequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                "continue_final_message",
            )
        extra = _plain(chat_template_kwargs or {}, "chat_template_kwargs", hide)
        for key in extra:
            if key in _RESERVED:
                raise RequestError(
                    f"chat_template_kwargs cannot set {key!r}.", "chat_template_kwargs"
                )
        variables = {
            "documents": _plain(documents, "documents", hide) or None,
            "add_generation_prompt": add_generation_prompt,
            **extra,
        }
        # One budget for the trials and the rendering.
        with rendering(max_length + len(_CONTINUE_TAG)):
            chat = self._chat(name, messages, hide)
            key = None if tools or documents or extra else _roles(chat)
            functions = None
            if key is None or (name, add_generation_prompt, key) not in self._as_they_are:
                read = chat
                trials = self._trials[name]
                chat, origins = trials.messages(read)
                functions = trials.tools(_plain(tools, "tools", hide))
                tried = partial(self._tried, name, variables=variables)
                options = (variables["documents"] is None, add_generation_prompt, extra)
                is_whole = trials.check(chat, origins, functions, tried, options)
                is_plain = is_whole and chat == read and functions is None
                if is_plain and key is not None and len(self._as_they_are) < _MOST_KNOWN:
                    self._as_they_are.add((name, add_generation_prompt, key))
            final = _tag_final(chat) if continue_final_message else None
            text = self._run(name, {"messages": chat, "tools": functions, **variables})
        return text if final is None else _cut_final(text, final)

    def _check(self, name: str, tools: Any, documents: list[dict[str, Any]] | None) -> None:
        """Raises RequestError if the template does not exist or cannot take these tools and
        documents."""
        if name not in self._templates:
            raise RequestError(
                f"the checkpoint has no chat template named {name!r}, only: "
                f"{', '.join(sorted(self._templates))}.",
                "messages",
            )
        if tools is not None and not isinstance(tools, list | tuple):
            raise RequestError(
                f"tools must be a list of mappings, not a {type(tools).__name__}.", "tools"
            )
        if documents and "documents" not in (names := self._names_of[name]):
            known = ", ".join(sorted(names - {*self._special_tokens, *make_environment().globals}))
            raise RequestError(
                f"documents: the chat template does not read them, only: {known:.300}. Put their "
                "texts into a message.",
                "documents",
            )

    def _name(self, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._templates else "default"

    def _chat(self, name: str, messages: Conversation, hide: Callable[[str], str]) -> list[Plain]:
        """The messages as plain data, with items of media as the template takes them. Call it
        within a budget."""
        trials = self._trials[name]
        read = _Reader(self._media_texts, hide)
        chat = [read.message(message) for message in messages]
        if not chat:
            raise RequestError("the conversation is empty: give at least one message.", "messages")
        if self._media_texts and any(isinstance(message.get("content"), list) for message in chat):
            written = self._written_media(name)
            missing = {
                kind: text for kind, text in self._media_texts.items() if kind not in written
            }
            takes_parts = written or trials.form(Sort("user", "text", False)).content == "parts"
            chat = [
                _with_media(message, missing, takes_parts=bool(takes_parts)) for message in chat
            ]
        return chat

    def _run(self, name: str, names: Mapping[str, Any]) -> str:
        max_length = BoundedEnvironment.budget().max_length
        chunks: list[str] = []
        length = 0
        try:
            for chunk in self._templates[name].generate({**self._special_tokens, **names}):
                chunks.append(chunk)
                length += len(chunk)
                if length > max_length:
                    raise ContextLengthError(
                        f"the conversation makes a text of more than {max_length} characters; "
                        "longer ones are not tokenized.",
                        "messages",
                    )
        except RequestError:
            raise
        except SecurityError as error:
            raise RequestError(
                f"the chat template tried what its sandbox forbids: {error}", "messages"
            ) from error
        except TemplateError as error:
            raise RequestError(
                f"the chat template refuses this conversation: {error}", "messages"
            ) from error
        except Exception as error:  # a template can raise whatever its expressions raise
            raise RequestError(
                f"the chat template cannot render this conversation: {type(error).__name__}: "
                f"{error}",
                "messages",
            ) from error
        return "".join(chunks)

    def _written_media(self, name: str) -> frozenset[str]:
        """Modalities of which the template writes the placeholder of an item that is in a list of
        parts with a text."""
        if name not in self._writes_media:
            self._writes_media[name] = frozenset(
                modality
                for modality, token in self._media_tokens.items()
                if self._writes(name, modality, token)
            )
        return self._writes_media[name]

    def _writes(self, name: str, modality: str, token: str) -> bool:
        text = self._tried(
            name, [{"role": "user", "content": [{"type": modality}, _PROBE_PART]}], None
        )
        return text is not None and _PROBE in text and token in text

    def _tried(
        self,
        name: str,
        messages: list[Plain],
        tools: list[Any] | None,
        variables: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Renders `messages` with a template; None if the template refuses them. Call it within a
        budget; OverBudgetError is passed on."""
        names = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
            **(variables or {}),
        }
        try:
            return self._run(name, names)
        except (ContextLengthError, OverBudgetError):
            raise
        except RequestError:
            return None


def find_chat_template(
    option: str | None,
    folder: Path,
    tokenizer_config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
) -> ChatTemplate | None:
    """The operator's template (a text, or the path of a file), else the checkpoint's; None where
    there is none.

    Raises ConfigError or CheckpointError.
    """
    if option is not None:
        return ChatTemplate({"default": _read_option(option)}, special_tokens, ConfigError)
    found: Any
    if (path := folder / "chat_template.jinja").is_file():
        found = _read(path)
    else:
        found = tokenizer_config.get("chat_template") or read_json(
            folder / "chat_template.json"
        ).get("chat_template")
    if not found:
        return None
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {
            str(form["name"]): form.get("template")
            for form in found
            if isinstance(form, dict) and "name" in form
        }
    if (
        not found
        or not isinstance(found, dict)
        or not all(isinstance(text, str) for text in found.values())
    ):
        raise CheckpointError(
            f"{folder}: chat_template must be a text, or a list of objects with a name and a "
            "template."
        )
    return ChatTemplate(found, special_tokens)


def _read(path: Path) -> str:
    """Reads a template, at most one character beyond MOST_SOURCE: enough to see that it is too
    long."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MOST_SOURCE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _compile(
    environment: BoundedEnvironment, source: str, error: Callable[[str], Exception]
) -> Template:
    if len(source) > MOST_SOURCE:
        raise error(f"the chat template is too long: it may have {MOST_SOURCE} characters.")
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as failure:
        raise error(
            f"the chat template does not parse: line {failure.lineno}: {failure.message}"
        ) from failure
    except (
        ArithmeticError,
        MemoryError,
        RecursionError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as failure:
        raise error(
            f"the chat template cannot be compiled: {type(failure).__name__}: {failure}"
        ) from failure


def _read_option(option: str) -> str:
    if "{{" in option or "{%" in option:
        return option
    try:
        return Path(option).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template {option!r} is neither a Jinja template nor a file that can be read: "
            f"{error}"
        ) from error


class _Reader(NamedTuple):
    """Reads messages of clients as plain data."""

    media_texts: Mapping[str, str]
    """Text that stands for an item of media, by modality. Empty: conversations have no media."""
    hide: Callable[[str], str]

    def message(self, message: Any) -> Plain:
        """`message` as plain data. Keys without a value are left out, and reasoning has its names,
        as in transformers."""
        if not isinstance(message, Mapping):
            raise RequestError(
                "a message must be a mapping with 'role' and 'content', not a "
                f"{type(message).__name__}.",
                "messages",
            )
        read = _plain(message, "messages", self.hide)
        plain = {key: value for key, value in read.items() if value is not None}
        if not _REASONING.isdisjoint(plain):
            plain = dict(with_reasoning(plain))
        if not isinstance(plain.get("role"), str):
            raise RequestError(
                "a message must have a 'role', such as 'user', 'assistant' or 'system'.", "messages"
            )
        content = plain.get("content")
        if isinstance(content, list):
            plain["content"] = [self._part(part) for part in content]
        elif content is not None and not isinstance(content, str):
            raise RequestError(
                "a message's content must be a text or a list of parts, not a "
                f"{type(content).__name__}.",
                "messages",
            )
        return plain

    def _part(self, part: Any) -> dict[str, str]:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if isinstance(part, dict) and isinstance(kind, str) and kind in self.media_texts:
            return {"type": kind}
        if kind != "text":
            known = f"text and {', '.join(self.media_texts)}" if self.media_texts else "text only"
            raise RequestError(
                f"this model takes {known}, not content of type {kind!r:.100}.", "messages"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError("a content part of type 'text' must have a 'text'.", "messages")
        return {"type": "text", "text": str(part["text"])}


def _roles(chat: list[Plain]) -> tuple[str, ...] | None:
    """Roles of a short conversation that holds only texts; None for any other. A blank content does
    not count as a text, because it gets no mark."""
    if len(chat) > _LONGEST_KNOWN or not all(_is_text(message) for message in chat):
        return None
    return tuple(message["role"] for message in chat)


def _is_text(message: Plain) -> bool:
    content = message.get("content")
    return (
        len(message) == 2
        and message["role"] in _ROLES
        and type(content) is str
        and bool(content.strip())
    )


def _with_media(message: Plain, texts: Mapping[str, str], *, takes_parts: bool) -> Plain:
    """A message whose items the template will write: as parts, as texts among parts, or as lines of
    one text. `texts`: of modalities that the template does not write."""
    parts = message.get("content")
    if not isinstance(parts, list) or all(part["type"] not in texts for part in parts):
        return message
    made = [
        {"type": "text", "text": texts[part["type"]]} if part["type"] in texts else part
        for part in parts
    ]
    return {**message, "content": made if takes_parts else "\n".join(part["text"] for part in made)}


def _plain(value: Any, param: str, hide: Callable[[str], str]) -> Any:
    """A copy of `value` made of JSON types only: a template must not reach methods of the caller's
    objects."""
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
    if content is None or content == []:
        raise RequestError(
            "continue_final_message needs a final message with content to continue.",
            "continue_final_message",
        )
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
        return content
    final: str | None = content[-1].get("text")
    if final is None:
        raise RequestError(
            "continue_final_message needs a final message that ends with a text to continue.",
            "continue_final_message",
        )
    content[-1]["text"] = final + _CONTINUE_TAG
    return final


def _cut_final(text: str, final: str) -> str:
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "the chat template does not write the final message as it is, so it cannot be "
            "continued.",
            "continue_final_message",
        )
    # A template that trims messages has eaten the tag's space, and would have eaten the message's
    # own.
    return text[:at] if text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG else text[:at].rstrip()
