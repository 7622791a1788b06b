"""Renderer: messages or prompts become token ids; token ids become text. Needs no torch."""

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
    """How a conversation is rendered. A renderer may have others beside these."""

    add_generation_prompt: bool
    """End with what opens an answer. True where not given."""
    continue_final_message: bool
    """Leave the last message open, for the answer to go on with it."""
    tools: Sequence[Mapping[str, Any]] | None
    """Functions that may be called, in the form of a chat completion's `tools`."""
    documents: Sequence[Mapping[str, Any]] | None
    """Texts that the template may quote."""
    chat_template: str | None
    """One in the place of the checkpoint's. Of renderers with Jinja templates."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further names for the template."""
    add_special_tokens: bool
    """Add those that the tokenizer adds to texts. Of renderers with Jinja templates."""
    mm_processor_kwargs: Mapping[str, Any] | None
    """How media are read. Of renderers that take them."""


class Rendered(NamedTuple):
    """A prompt, or a conversation, in tokens."""

    token_ids: list[int]
    features: list[MultiModalFeatureSpec] | None = None
    """Items of media that stand among them, by offset."""


class RenderedText(NamedTuple):
    """A text, or a pair of texts, in tokens."""

    token_ids: list[int]
    second_text_start: int | None = None
    """Of a pair: the position of the first token that belongs to the second text."""
    pooling_start: int = 0
    """Position of the first token that an embedding is made of: after the checkpoint's prompt,
    where that is left out."""
    num_attended: int | None = None
    """Only so many tokens, from the first on, are seen by attention; None: all."""


class DecodeStream(ABC):
    """Turns one sequence's tokens into text, as they come.

    All of it: the marks of reasoning and of tool calls too. Stop texts, and the places of tokens,
    are places in this text. What tells the parts of an answer from each other, an AnswerParser,
    reads it, and nothing is held back here for that.
    """

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add. Bytes of an unfinished character are held back."""

    @abstractmethod
    def flush(self) -> str:
        """What was held back, with U+FFFD for bytes that make no character. Ends the stream."""


class Renderer(ABC):
    """All preparation of input ends here: the engine takes tokens in and gives tokens out.

    One instance serves all requests of an engine, from several threads. Methods raise RequestError
    for input that cannot be rendered.
    """

    plugins: Plugins | None = None
    """Those of the engine that made it, objects among them. None: nothing made it but its class."""
    rules: MultiModalRules | None = None
    """Of a multimodal model. None: images and other media in conversations and prompts are
    refused."""
    feature_cache: FeatureLookup | None = None
    """What the engine holds of items of media: an item that is found is neither decoded nor
    processed, and its data is None."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config

    def take_rules(self, rules: MultiModalRules) -> None:
        """Called before the first request to a multimodal model. Raises CheckpointError or
        ConfigError where its media cannot be read."""
        self.rules = rules

    @classmethod
    def refuses(cls, config: VllmConfig) -> str | None:
        """Why this class cannot serve the checkpoint; None when it can. Of `config` the model class
        and its runner may be open."""
        return None

    @abstractmethod
    def render_conversation(self, messages: Conversation, **kwargs: Any) -> Rendered:
        """A conversation in tokens, through the chat template.

        `kwargs`: ConversationOptions, and what the renderer takes beside them. Raises RequestError
        for others.
        """

    async def render_conversation_async(self, messages: Conversation, **kwargs: Any) -> Rendered:
        """As `render_conversation`, awaited. This one calls that in a thread.

        A renderer that waits for other machines overrides it and `render_prompt_async`, so that who
        waits holds no thread. They may be called from several event loops. Cancelling them ends
        what they wait for.
        """
        return await asyncio.to_thread(self.render_conversation, messages, **kwargs)

    def media_size(
        self, part: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        """Bytes of memory that an item of media takes at most: what is made of it, and what it
        takes beside that while it is read.

        `part`: of a conversation's content, as clients send it. `options`: `mm_processor_kwargs`.
        None: that cannot be told. It is asked before any work is done for a request, on the event
        loop: a header may be read, and nothing is fetched.
        """
        return None

    def tokenized_at_once(self, text: str) -> int:
        """Bytes of a text, in UTF-8, that are tokenized at a time, at most: of what a tokenizer
        holds meanwhile, for each token.

        It is asked before any work is done for a request, on the event loop. This one tells all of
        them.
        """
        return len(text.encode(errors="surrogatepass"))

    @property
    def has_text(self) -> bool:
        """It makes text of tokens. False: what it makes is empty, and stop texts are refused."""
        return True

    @property
    def has_chat_template(self) -> bool:
        """It can render conversations."""
        return True

    @property
    def writes_tools(self) -> bool:
        """Its prompts tell the model of tools. False: conversations with tools are refused."""
        return True

    @property
    def chat_template_source(self) -> str:
        """The source of the chat template; where there is none, the marks that answers may have.
        Answer formats are chosen by it."""
        return ""

    @property
    def template_names(self) -> frozenset[str] | None:
        """The names that the chat template reads of what it is given. Whoever asks for others is
        told so. None: they are not known."""
        return None

    @abstractmethod
    def render_prompt(
        self, prompt: SingletonPrompt, *, add_special_tokens: bool = True
    ) -> Rendered:
        """A prompt in tokens, at least one.

        Token ids that are given are passed on as they are: the engine checks that the model has
        them.
        """

    async def render_prompt_async(
        self, prompt: SingletonPrompt, *, add_special_tokens: bool = True
    ) -> Rendered:
        """As `render_prompt`, awaited: see `render_conversation_async`."""
        return await asyncio.to_thread(
            self.render_prompt, prompt, add_special_tokens=add_special_tokens
        )

    def render_texts(
        self, texts: Sequence[str | tuple[str, str]], *, max_tokens: int | None = None
    ) -> list[RenderedText]:
        """Token ids of whole texts, or pairs of texts joined as the model wants them, special
        tokens included; for pooling.

        What is longer than `max_tokens` is cut at the end (of a pair, the longer text first),
        special tokens kept. This one renders texts one by one; pairs are for renderers that know
        how to join them.
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
        """Of each text the beginning that `max_tokens` have room for, special tokens included. A
        text that is not too long stays as it is.

        Raises RequestError for `max_tokens` where they have room for no text. This one tries
        lengths by halves.
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
        """A new stream for one sequence's output. The prompt's last tokens decide how the first
        token joins on (a leading space)."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of these tokens together."""

    @abstractmethod
    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's own text (for logprobs), special tokens included."""

    def token_bytes(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> list[bytes]:
        """The bytes that each token adds to a text that it does not begin: b"" for none. Part of a
        character is a few of its bytes.

        This one gives those of the token's own text.
        """
        if skip_special_tokens:
            return [
                self.decode([token_id], skip_special_tokens=True).encode() for token_id in token_ids
            ]
        return [text.encode() for text in self.token_texts(token_ids)]

    def vocabulary_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it ("Ġupon"). This one gives its own text."""
        return self.token_texts(token_ids)

    def get_tokenizer(self) -> Any:
        """The tokenizer by itself, with the methods that transformers' have. This one has none to
        give."""
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
