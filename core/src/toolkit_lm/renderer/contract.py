"""Renderer: converts messages or prompts to token ids, and token ids to text. Needs no torch."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError, UnsupportedError
from toolkit_lm.messages import MultiModalFeatureSpec
from toolkit_lm.plugin import Plugins
from toolkit_lm.prompts import Conversation, SingletonPrompt
from toolkit_lm.renderer.feature_lookup import FeatureLookup
from toolkit_lm.renderer.multimodal import MultiModalRules


class ConversationOptions(TypedDict, total=False):
    """Options for rendering a conversation. A renderer may have others too."""

    add_generation_prompt: bool
    """Whether the prompt ends with the opening of an answer. Default: True."""
    continue_final_message: bool
    """Whether the last message is left open, so that the answer continues it."""
    tools: Sequence[Mapping[str, Any]] | None
    """Functions that the model may call, in the form of a chat completion's `tools`."""
    documents: Sequence[Mapping[str, Any]] | None
    """Texts that the template may quote."""
    chat_template: str | None
    """Chat template in place of the checkpoint's. Only for renderers with Jinja templates."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further variables for the template."""
    add_special_tokens: bool
    """Whether to add the tokens that the tokenizer adds to texts. Only for renderers with Jinja
    templates."""
    mm_processor_kwargs: Mapping[str, Any] | None
    """Options of the media processor. Only for renderers that take them."""


class Rendered(NamedTuple):
    """A rendered prompt or conversation, in tokens."""

    token_ids: list[int]
    features: list[MultiModalFeatureSpec] | None = None
    """Multimodal items among the tokens, by offset."""


class RenderedText(NamedTuple):
    """A rendered text, or pair of texts, in tokens."""

    token_ids: list[int]
    second_text_start: int | None = None
    """Position of the first token of the second text, for a pair."""
    pooling_start: int = 0
    """Position of the first token that an embedding is computed from: after the checkpoint's
    prompt, if that is left out."""
    num_attended: int | None = None
    """Number of first tokens that attention sees; None: all."""
    features: list[MultiModalFeatureSpec] | None = None
    """Multimodal items among the tokens, by offset."""


class DecodeStream(ABC):
    """Converts one sequence's tokens to text, as they come.

    The text includes the marks of reasoning and of tool calls. Stop texts, and positions of tokens,
    refer to this text. An AnswerParser reads it, but nothing is held back here for the parser.
    """

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens add. Bytes of an unfinished character are held
        back."""

    @abstractmethod
    def flush(self) -> str:
        """Returns the text held back, with U+FFFD for bytes that make no character. Ends the
        stream."""


class Renderer(ABC):
    """All input preparation ends here: the engine takes tokens and returns tokens.

    One instance serves all requests of an engine, from several threads. Methods raise RequestError
    for input that cannot be rendered.
    """

    plugins: Plugins | None = None
    """Plugins of the engine that made the renderer, including objects from code. None: it was made
    without an engine."""
    rules: MultiModalRules | None = None
    """Rules of a multimodal model. None: images and other media in conversations and prompts are
    refused."""
    feature_cache: FeatureLookup | None = None
    """Lookup of the multimodal items that the engine holds. A found item is neither decoded nor
    processed, and its data is None."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config

    def set_rules(self, rules: MultiModalRules) -> None:
        """Called before the first request to a multimodal model. Raises CheckpointError or
        ConfigError if its media cannot be read."""
        self.rules = rules

    @classmethod
    def refuses(cls, config: VllmConfig) -> str | None:
        """Returns why this class cannot serve the checkpoint; None: it can. The model class and its
        runner in `config` may be unresolved."""
        return None

    @abstractmethod
    def render_conversation(self, messages: Conversation, **kwargs: Any) -> Rendered:
        """Converts a conversation to tokens, with the chat template.

        `kwargs`: ConversationOptions, and the renderer's further options. Raises RequestError for
        others.
        """

    async def render_conversation_async(self, messages: Conversation, **kwargs: Any) -> Rendered:
        """Awaitable `render_conversation`. By default runs it in a thread.

        A renderer that waits for other machines overrides it and `render_prompt_async`, so that
        waiting takes no thread. They may be called from several event loops. Cancelling them
        cancels what they wait for.
        """
        return await asyncio.to_thread(self.render_conversation, messages, **kwargs)

    def media_size(
        self, part: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        """Most bytes of memory that a multimodal item takes: for the result, and in addition while
        it is read.

        `part`: a part of a conversation's content, as clients send it. `options`:
        `mm_processor_kwargs`. None: unknown. Called before any work for a request, on the event
        loop: a header may be read, but nothing is fetched.
        """
        return None

    def tokenized_at_once(self, text: str) -> int:
        """Most bytes of a text, in UTF-8, that are tokenized at a time. They bound the memory that
        a tokenizer uses per token.

        Called before any work for a request, on the event loop. By default: all bytes of the text.
        """
        return len(text.encode(errors="surrogatepass"))

    @property
    def has_text(self) -> bool:
        """Whether the renderer converts tokens to text. False: the text is empty, and stop texts
        are refused."""
        return True

    @property
    def has_chat_template(self) -> bool:
        """Whether the renderer can render conversations."""
        return True

    @property
    def writes_tools(self) -> bool:
        """Whether prompts describe tools to the model. False: conversations with tools are
        refused."""
        return True

    @property
    def chat_template_source(self) -> str:
        """Source of the chat template, or the marks that answers may have if there is none. Answer
        formats are selected by it."""
        return ""

    @property
    def template_names(self) -> frozenset[str] | None:
        """Variables that the chat template reads. A request with others gets an error. None:
        unknown."""
        return None

    @abstractmethod
    def render_prompt(
        self, prompt: SingletonPrompt, *, add_special_tokens: bool = True
    ) -> Rendered:
        """Converts a prompt to at least one token.

        Given token ids are returned unchanged: the engine checks that the model has them.
        """

    async def render_prompt_async(
        self, prompt: SingletonPrompt, *, add_special_tokens: bool = True
    ) -> Rendered:
        """Awaitable `render_prompt`; see `render_conversation_async`."""
        return await asyncio.to_thread(
            self.render_prompt, prompt, add_special_tokens=add_special_tokens
        )

    def render_texts(
        self, texts: Sequence[str | tuple[str, str]], *, max_tokens: int | None = None
    ) -> list[RenderedText]:
        """Token ids of whole texts, or of pairs of texts joined in the model's format, with special
        tokens; for pooling.

        Texts longer than `max_tokens` are cut at the end (in a pair, the longer text first);
        special tokens are kept. By default texts are rendered one by one. Pairs need a renderer
        that can join them.
        """
        rendered = []
        for text in texts:
            if not isinstance(text, str):
                raise RequestError(
                    f"{type(self).__name__} does not know how to join a pair of texts.", "input"
                )
            rendered.append(RenderedText(self.render_prompt(text).token_ids[:max_tokens]))
        return rendered

    def cut_texts(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """Returns the beginning of each text that fits into `max_tokens` with special tokens. A
        text that fits is unchanged.

        Raises RequestError if `max_tokens` leave no room for any text. By default lengths are
        searched by bisection.
        """

        def length(text: str) -> int:
            return len(self.render_texts([text])[0].token_ids)

        cut = []
        for text in texts:
            kept = len(text)
            if length(text) > max_tokens:
                kept = bisect_right(
                    range(1, len(text)), max_tokens, key=lambda end: length(text[:end])
                )
                if not kept:
                    raise RequestError(
                        f"{max_tokens} tokens leave no room for a text: ask for more.", "max_tokens"
                    )
            cut.append(text[:kept])
        return cut

    @abstractmethod
    def decode_stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        """Makes a new stream for one sequence's output. The prompt's last tokens decide how the
        first token is joined (a leading space)."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of these tokens together."""

    @abstractmethod
    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token alone (for logprobs), with special tokens."""

    def token_bytes(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> list[bytes]:
        """Bytes that each token adds within a text: b"" for none. A token with a part of a
        character adds some of its bytes.

        By default: the bytes of the token's own text.
        """
        if skip_special_tokens:
            return [
                self.decode([token_id], skip_special_tokens=True).encode() for token_id in token_ids
            ]
        return [text.encode() for text in self.token_texts(token_ids)]

    def vocabulary_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it ("Ġupon"). By default: its own text."""
        return self.token_texts(token_ids)

    def get_tokenizer(self) -> Any:
        """The underlying tokenizer, with the methods of transformers' tokenizers. By default: there
        is none."""
        raise UnsupportedError(
            f"{type(self).__name__} gives no tokenizer by itself: use the methods of "
            "llm.engine.renderer."
        )

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Token ids below this one can be decoded."""

    @property
    @abstractmethod
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a sequence: those of the checkpoint's generation config, config and
        tokenizer."""
