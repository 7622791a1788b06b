"""RemoteRenderer: prompts become tokens on render servers; tokens become text here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from toolkit_lm.config import VllmConfig, parse_memory
from toolkit_lm.errors import ConfigError, RequestError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing.validation import check_token_ids
from toolkit_lm.prompts import Conversation, SingletonPrompt, parse_prompt
from toolkit_lm.renderer import DecodeStream, Rendered, RenderedText, Renderer
from toolkit_lm.resolution.resolution import choose_renderer

from toolkit_lm_renderer_remote import Options
from toolkit_lm_renderer_remote.media import count_media, plain, plain_data, plain_messages
from toolkit_lm_renderer_remote.reading import Answer, WrongAnswerError
from toolkit_lm_renderer_remote.servers import RenderServers
from toolkit_lm_renderer_remote.wire import RENDER_CHAT, RENDER_PROMPTS, TOKENIZE

_CHAT_OPTIONS = (
    *("add_generation_prompt", "continue_final_message", "tools", "documents", "chat_template", "chat_template_kwargs"),
    *("add_special_tokens", "mm_processor_kwargs"),
)
_MEDIA = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")
_SLACK = 2**16
_BYTES_OF_TOKEN = 16
"""That an answer may have for each token, a mask's entry included."""
_MOST_HELD = 512
"""Identifiers that a render server is told of."""


class RemoteRenderer(Renderer):
    """Asks the servers of `renderer_url`. They must serve the same model: their answers are checked, but not known to be the right ones.

    A stream of tokens becomes text without a call per token, by a renderer in this process that reads the checkpoint's tokenizer. It makes
    the texts of pooling, too, which render servers have no route for.

    Raises ConfigError where there is no server, or nothing here that reads the tokenizer. The servers need not be up yet.
    """

    @classmethod
    def refuses(cls, config: VllmConfig) -> str | None:
        return None if config.renderer.renderer_url else "no render server is named: give --renderer-url"

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
            raise ConfigError(f"option renderer_remote.max_answer_size: {options.max_answer_size!r} must be bytes, such as '256MiB'.")
        self._most_media = most
        self._servers = RenderServers(
            config.renderer.renderer_url, timeout=options.timeout, connect_timeout=options.connect_timeout, api_key=options.api_key
        )

    # Input, rendered elsewhere

    def render_conversation(self, messages: Conversation, **kwargs: Any) -> Rendered:
        for name in kwargs:
            if name not in _CHAT_OPTIONS:
                raise RequestError(f"render_conversation takes no option {name!r}.", name)
        num_media = count_media(messages)
        messages = plain_messages(messages) if num_media[1] else messages
        body = {"messages": messages, **{name: value for name, value in kwargs.items() if value is not None}}
        return self._render(RENDER_CHAT, body, num_media, Answer.prompt)

    def render_prompt(self, prompt: SingletonPrompt, *, add_special_tokens: bool = True) -> Rendered:
        parsed: Any = parse_prompt(prompt, media=True)
        media: dict[str, Any] = {name: parsed[name] for name in _MEDIA if parsed.get(name)}
        token_ids = parsed.get("prompt_token_ids")
        if not media:
            if token_ids is not None:
                return self._local.render_prompt(parsed)
            body = {"prompt": parsed["prompt"], "add_special_tokens": add_special_tokens}
            return self._render(TOKENIZE, body, (0, 0), lambda answer, *_: answer.tokens())
        given = parsed["prompt"] if token_ids is None else token_ids
        items = media["multi_modal_data"] = plain_data(media.get("multi_modal_data", {}))
        count = sum(len(one) if isinstance(one, list) else 1 for one in items.values())
        body = {"prompt": given, "add_special_tokens": add_special_tokens, **media}
        return self._render(RENDER_PROMPTS, body, (count, count), Answer.only_prompt)

    def render_texts(self, texts: Sequence[str | tuple[str, str]], *, max_tokens: int | None = None) -> list[RenderedText]:
        return self._local.render_texts(texts, max_tokens=max_tokens)

    def cut_texts(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        return self._local.cut_texts(texts, max_tokens)

    def _render(self, path: str, body: dict[str, Any], num_media: tuple[int, int], read: Callable[..., Rendered]) -> Rendered:
        """`num_media`: the fewest and the most items of media in `body`."""
        if not num_media[1]:
            return self._ask(path, body, num_media, [], read)
        body = plain(body)
        held = [] if self.feature_cache is None else self.feature_cache.held_keys(_MOST_HELD)
        rendered = self._ask(path, body, num_media, held, read)
        if self._lacks(rendered):
            # Meanwhile the engine has forgotten an item.
            rendered = self._ask(path, body, num_media, [], read)
        return rendered

    def _ask(self, path: str, body: dict[str, Any], num_media: tuple[int, int], held: list[str], read: Callable[..., Rendered]) -> Rendered:
        # The length is checked here, where it is known whether the prompt is to be cut.
        more = {} if path == TOKENIZE else {"check_length": False}
        sent = _encoded({**body, **more, **({"held": held} if held else {})})
        fewest, count = num_media
        most, too_large = _SLACK + _BYTES_OF_TOKEN * self.config.max_model_len + 8 * len(sent), None
        if count:
            most += self._most_media
            too_large = f"the prompt's images and other media are too large: renderer_remote.max_answer_size is {self._most_media} bytes."

        def checked(answer: Answer) -> Rendered:
            return self._checked(read(answer, count, held, fewest))

        return self._servers.ask(path, sent, checked, most=most, too_large=too_large)

    def _checked(self, rendered: Rendered) -> Rendered:
        """Raises WrongAnswerError for what is not this model's: the next server may know better."""
        try:
            check_token_ids(rendered.token_ids, self._vocab_size)
            for one in rendered.features or ():
                if self.rules is None:
                    raise RequestError("this model takes no media.")
                if one.data is not None:
                    self.rules.check(one, rendered.token_ids)
        except RequestError as error:
            raise WrongAnswerError(f"its answer is of another model: {error}") from None
        return rendered

    def _lacks(self, rendered: Rendered) -> bool:
        """Whether the engine lacks an item. Those that it has stay until the request is sent."""
        cache = self.feature_cache
        return any(one.data is None and (cache is None or cache.get(one.mm_identifier) is None) for one in rendered.features or ())

    # Output, and what is known of the tokenizer

    def decode_stream(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> DecodeStream:
        return self._local.decode_stream(prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._local.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return self._local.token_texts(token_ids)

    def vocabulary_texts(self, token_ids: Sequence[int]) -> list[str]:
        return self._local.vocabulary_texts(token_ids)

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
    """What reads the tokenizer in this process. Raises ConfigError."""
    config = config.replace(renderer="auto", renderer_url=[])
    try:
        name, _ = choose_renderer(config, plugins)
    except UnsupportedError as error:
        raise ConfigError(
            "renderer 'remote' makes text of tokens in this process, for a call per token would hold up all requests, and nothing here "
            f"reads the model's tokenizer: {error} Give its folder with --tokenizer."
        ) from error
    made: Renderer = plugins.renderers.make(name, config)
    return made


def _encoded(body: dict[str, Any]) -> bytes:
    """Raises RequestError for what JSON has no form for."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not a valid text: lone surrogate at position {error.start}.", "prompt") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the prompt cannot be sent to a render server: {error}", "prompt") from None
