"""RemoteRenderer: prompts become tokens on render servers; tokens become text here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import msgspec
from toolkit_lm.config import VllmConfig, parse_memory
from toolkit_lm.errors import ConfigError, RequestError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing import check_token_ids
from toolkit_lm.prompts import Conversation, SingletonPrompt, parse_prompt
from toolkit_lm.renderer import MEDIA_OWNER, DecodeStream, Rendered, RenderedText, Renderer
from toolkit_lm.resolution import choose_renderer

from toolkit_lm_renderer_remote import Options
from toolkit_lm_renderer_remote.media import (
    count_media,
    plain,
    plain_data,
    plain_messages,
    with_named,
)
from toolkit_lm_renderer_remote.reading import Answer, WrongAnswerError
from toolkit_lm_renderer_remote.servers import RenderServers
from toolkit_lm_renderer_remote.wire import RENDER_CHAT, RENDER_PROMPTS, TOKENIZE

_CHAT_OPTIONS = (
    *(
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "documents",
        "chat_template",
        "chat_template_kwargs",
    ),
    *("add_special_tokens", "mm_processor_kwargs"),
)
_MEDIA = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")
_SLACK = 2**16
_BYTES_OF_TOKEN = 16
"""That an answer may have for each token, a mask's entry included."""
_MOST_HELD = 512
"""Identifiers of held items that a request to a render server names."""


class _Question(NamedTuple):
    """Question for a render server."""

    path: str
    body: dict[str, Any]
    fewest_media: int
    most_media: int
    """Items of media in it."""
    read: Callable[..., Rendered]
    """An answer, the most items, those that are held, and the fewest."""


class _Sent(NamedTuple):
    """The arguments of RenderServers.ask."""

    path: str
    body: bytes
    read: Callable[[Answer], Rendered]
    bounds: _Bounds


class _Bounds(TypedDict):
    most: int
    too_large: str | None


class RemoteRenderer(Renderer):
    """Renders by asking the servers of `renderer_url`. They must serve the same model: their
    answers are checked for form, not for being right.

    A stream of tokens becomes text without a call per token, by a renderer in this process that
    reads the checkpoint's tokenizer. It also makes the texts of pooling, for which render servers
    have no route.

    Raises ConfigError if no server is named, or no renderer here reads the tokenizer. The servers
    need not be up yet."""

    @classmethod
    def refuses(cls, config: VllmConfig) -> str | None:
        return (
            None if config.renderer.renderer_url else "no render server is named: give renderer_url"
        )

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        if (reason := self.refuses(config)) is not None:
            raise ConfigError(f"renderer 'remote': {reason}.")
        plugins = Plugins.load(config.plugins)
        self._local = _local(config, plugins)
        self._vocab_size = config.vocab_size or self._local.vocab_size
        options: Options = plugins.options("renderer_remote")
        most = parse_memory(options.max_answer_size)
        if not isinstance(most, int):
            raise ConfigError(
                f"option renderer_remote.max_answer_size: {options.max_answer_size!r} must be "
                "bytes, such as '256MiB'."
            )
        self._most_media = most
        self._servers = RenderServers(
            config.renderer.renderer_url,
            timeout=options.timeout,
            connect_timeout=options.connect_timeout,
            api_key=options.api_key,
        )

    # Input, rendered elsewhere

    def render_conversation(self, messages: Conversation, **kwargs: Any) -> Rendered:
        return self._render(self._conversation(messages, kwargs))

    async def render_conversation_async(self, messages: Conversation, **kwargs: Any) -> Rendered:
        return await self._render_async(
            await asyncio.to_thread(self._conversation, messages, kwargs)
        )

    def render_prompt(
        self, prompt: SingletonPrompt, *, add_special_tokens: bool = True
    ) -> Rendered:
        question = self._prompt(prompt, add_special_tokens)
        return question if isinstance(question, Rendered) else self._render(question)

    async def render_prompt_async(
        self, prompt: SingletonPrompt, *, add_special_tokens: bool = True
    ) -> Rendered:
        question = await asyncio.to_thread(self._prompt, prompt, add_special_tokens)
        return question if isinstance(question, Rendered) else await self._render_async(question)

    def render_texts(
        self, texts: Sequence[str | tuple[str, str]], *, max_tokens: int | None = None
    ) -> list[RenderedText]:
        return self._local.render_texts(texts, max_tokens=max_tokens)

    def cut_texts(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        return self._local.cut_texts(texts, max_tokens)

    def _conversation(self, messages: Conversation, options: dict[str, Any]) -> _Question:
        for name in options:
            if name not in _CHAT_OPTIONS:
                raise RequestError(f"render_conversation takes no option {name!r}.", name)
        fewest, most = count_media(messages)
        messages = plain_messages(messages) if most else messages
        body = {
            "messages": messages,
            **{name: value for name, value in options.items() if value is not None},
        }
        return _Question(RENDER_CHAT, plain(body) if most else body, fewest, most, Answer.prompt)

    def _prompt(self, prompt: SingletonPrompt, add_special_tokens: bool) -> _Question | Rendered:
        """Token ids need no render server."""
        parsed: Any = parse_prompt(prompt, media=True)
        media: dict[str, Any] = {name: parsed[name] for name in _MEDIA if parsed.get(name)}
        token_ids = parsed.get("prompt_token_ids")
        if not media:
            if token_ids is not None:
                return self._local.render_prompt(parsed)
            body = {"prompt": parsed["prompt"], "add_special_tokens": add_special_tokens}
            return _Question(TOKENIZE, body, 0, 0, lambda answer, *_: answer.tokens())
        text_or_ids = parsed["prompt"] if token_ids is None else token_ids
        items = media["multi_modal_data"] = plain_data(
            with_named(media.get("multi_modal_data", {}), media.get("multi_modal_uuids", {}))
        )
        count = sum(len(item) if isinstance(item, list) else 1 for item in items.values())
        body = plain({"prompt": text_or_ids, "add_special_tokens": add_special_tokens, **media})
        return _Question(RENDER_PROMPTS, body, count, count, Answer.only_prompt)

    def _render(self, question: _Question) -> Rendered:
        path, sent, read, bounds = self._sent(question, self._held(question))
        rendered = self._servers.ask(path, sent, read, **bounds)
        if self._lacks(rendered):
            # Meanwhile the engine has forgotten an item.
            path, sent, read, bounds = self._sent(question, [])
            rendered = self._servers.ask(path, sent, read, **bounds)
        return rendered

    async def _render_async(self, question: _Question) -> Rendered:
        """Awaitable form of `_render`."""
        path, sent, read, bounds = await asyncio.to_thread(
            self._sent, question, self._held(question)
        )
        rendered = await self._servers.ask_async(path, sent, read, **bounds)
        if self._lacks(rendered):
            path, sent, read, bounds = await asyncio.to_thread(self._sent, question, [])
            rendered = await self._servers.ask_async(path, sent, read, **bounds)
        return rendered

    def _held(self, question: _Question) -> list[str]:
        return (
            []
            if self.feature_cache is None or not question.most_media
            else self.feature_cache.held_keys(_MOST_HELD)
        )

    def _sent(self, question: _Question, held: list[str]) -> _Sent:
        """The encoded question, with the items that the engine holds."""
        # The length is checked here, where it is known whether the prompt is to be cut.
        more: dict[str, Any] = {} if question.path == TOKENIZE else {"check_length": False}
        if question.most_media and (owner := MEDIA_OWNER.get()):
            more["media_owner"] = owner
        sent = _encoded({**question.body, **more, **({"held": held} if held else {})})
        most = _SLACK + _BYTES_OF_TOKEN * self.config.max_model_len + 8 * len(sent)
        too_large = None
        if question.most_media:
            most += self._most_media
            too_large = (
                "the prompt's images and other media are too large: "
                f"renderer_remote.max_answer_size is {self._most_media} bytes."
            )

        def checked(answer: Answer) -> Rendered:
            return self._checked(
                question.read(answer, question.most_media, held, question.fewest_media)
            )

        return _Sent(question.path, sent, checked, {"most": most, "too_large": too_large})

    def _checked(self, rendered: Rendered) -> Rendered:
        """Raises WrongAnswerError for what is not this model's: the next server may know better."""
        try:
            check_token_ids(rendered.token_ids, self._vocab_size)
            for feature in rendered.features or ():
                if self.rules is None:
                    raise RequestError("this model takes no media.")
                if feature.data is not None:
                    self.rules.check(feature, rendered.token_ids)
        except RequestError as error:
            raise WrongAnswerError(f"its answer is of another model: {error}") from None
        return rendered

    def _lacks(self, rendered: Rendered) -> bool:
        """Whether the engine lacks an item. Those that it has stay until the request is sent."""
        cache = self.feature_cache
        return any(
            feature.data is None and (cache is None or cache.get(feature.mm_identifier) is None)
            for feature in rendered.features or ()
        )

    # Output, and what is known of the tokenizer

    def decode_stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        return self._local.decode_stream(prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._local.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return self._local.token_texts(token_ids)

    def token_bytes(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> list[bytes]:
        return self._local.token_bytes(token_ids, skip_special_tokens=skip_special_tokens)

    def vocabulary_texts(self, token_ids: Sequence[int]) -> list[str]:
        return self._local.vocabulary_texts(token_ids)

    @property
    def has_chat_template(self) -> bool:
        """True: that of the render servers counts, and they say where there is none."""
        return True

    @property
    def template_names(self) -> frozenset[str] | None:
        return self._local.template_names

    @property
    def writes_tools(self) -> bool:
        return self._local.writes_tools

    @property
    def chat_template_source(self) -> str:
        return self._local.chat_template_source

    @property
    def has_text(self) -> bool:
        return self._local.has_text

    @property
    def vocab_size(self) -> int:
        return self._local.vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        return self._local.eos_token_ids


def _local(config: VllmConfig, plugins: Plugins) -> Renderer:
    """Renderer that reads the tokenizer in this process. Raises ConfigError."""
    config = config.replace(renderer="auto", renderer_url=[])
    try:
        name, _ = choose_renderer(config, plugins)
    except UnsupportedError as error:
        raise ConfigError(
            "renderer 'remote' makes text of tokens in this process, for a call per token would "
            "hold up all requests, and nothing here "
            f"reads the model's tokenizer: {error} Give its folder with tokenizer='FOLDER'."
        ) from error
    made: Renderer = plugins.renderers.make(name, config)
    return made


def _encoded(body: dict[str, Any]) -> bytes:
    """JSON of a body. Raises RequestError if it cannot be written as JSON."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not a valid text: lone surrogate at position {error.start}.", "prompt"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"the prompt cannot be sent to a render server: {error}", "prompt"
        ) from None
