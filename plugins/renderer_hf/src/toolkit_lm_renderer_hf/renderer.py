"""HfRenderer: prompts and conversations become token ids, token ids become text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenizers import Tokenizer
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import (
    CheckpointError,
    ContextLengthError,
    RequestError,
    UnsupportedError,
    nearest,
)
from toolkit_lm.prompts import Conversation, SingletonPrompt, parse_prompt
from toolkit_lm.renderer import DecodeStream, MultiModalRules, Rendered, RenderedText, Renderer

from toolkit_lm_renderer_hf.chat_template import ChatTemplate, find_chat_template
from toolkit_lm_renderer_hf.detokenizer import Detokenizer, TextStream
from toolkit_lm_renderer_hf.end_tokens import end_tokens, text_config
from toolkit_lm_renderer_hf.joining import Joiner
from toolkit_lm_renderer_hf.panic import is_panic, panics_as
from toolkit_lm_renderer_hf.pieces import PIECE
from toolkit_lm_renderer_hf.tokenizer import LoadedTokenizer, load_tokenizer
from toolkit_lm_renderer_hf.tokenizer_class import PROBE

if TYPE_CHECKING:
    from toolkit_lm_renderer_hf.audio_processor import AudioProcessor
    from toolkit_lm_renderer_hf.image_processor import ImageProcessor
    from toolkit_lm_renderer_hf.media_items import Item
    from toolkit_lm_renderer_hf.multimodal import MultiModal

logger = logging.getLogger(__name__)

_MAX_CHARS = 1 << 20
"""Most characters of one text: about a second of work. A text may have many more characters than
tokens: spaces that are dropped, or a word that is one unknown token."""

_CHAT_OPTIONS = (
    *(
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "documents",
        "chat_template",
        "chat_template_kwargs",
    ),
    "add_special_tokens",
)
_REQUESTED = 16
"""Chat templates of requests that are kept."""


class HfRenderer(Renderer):
    """Text renderer for a checkpoint in Hugging Face layout.

    Reads tokenizer.json (else whatever transformers can convert), tokenizer_config.json and the
    chat template. Raises CheckpointError for a missing or broken file, ConfigError for a wrong
    `tokenizer` or `chat_template` option.
    """

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
        folder = Path(config.renderer.tokenizer or config.checkpoint.path)
        if not folder.is_dir():
            raise CheckpointError(f"tokenizer folder {str(folder)!r} does not exist.")
        self._folder = Path(config.checkpoint.path)
        self._tokenizer_folder = folder
        self._multimodal: MultiModal | None = None
        self.images: ImageProcessor | None = None
        """Processor of images that a subclass has set before `set_rules`; None: the folder's."""
        self.audio: AudioProcessor | None = None
        """Processor of recordings, likewise."""
        self._tokenizer, special_tokens, tokenizer_config = self._load_tokenizer(
            folder, config.model.trust_remote_code
        )
        self._detokenizer = Detokenizer(self._tokenizer)
        self._joiner = Joiner(self._tokenizer)
        self._chat_template = find_chat_template(
            config.renderer.chat_template, folder, tokenizer_config, special_tokens
        )
        self._special_tokens = special_tokens
        self._requested = lru_cache(_REQUESTED)(self._compile_requested)
        vocab = self._tokenizer.get_vocab()
        tokenizer_size = max(vocab.values(), default=-1) + 1
        self._vocab_size = max(tokenizer_size, text_config(config.hf_config).get("vocab_size") or 0)
        self._max_chars = max(_MAX_CHARS, config.max_model_len * max(map(len, vocab), default=1))
        self._eos_token_ids = end_tokens(
            config,
            vocab.get(special_tokens.get("eos_token", "")),
            config.vocab_size or self._vocab_size,
        )

    def _load_tokenizer(self, folder: Path, trust_remote_code: bool) -> LoadedTokenizer:
        return load_tokenizer(folder, trust_remote_code)

    def get_tokenizer(self) -> Any:
        """That of transformers. Raises UnsupportedError where transformers is not installed, or
        cannot read the folder.

        Where its class makes other ids than tokenizer.json, by which the engine goes, a warning in
        the log says so.
        """
        try:
            from transformers import AutoTokenizer

            trusted = self.config.model.trust_remote_code
            tokenizer = AutoTokenizer.from_pretrained(  # nosec B615 # of a folder
                self._tokenizer_folder, trust_remote_code=trusted, local_files_only=True
            )
        except (ImportError, ValueError, OSError) as error:
            raise UnsupportedError(
                f"transformers gives no tokenizer of {str(self._tokenizer_folder)!r}: {error}"
            ) from error
        ours = self._tokenizer.encode(PROBE, add_special_tokens=False).ids
        if tokenizer(PROBE, add_special_tokens=False)["input_ids"] != ours:
            problem = (
                "makes other token ids than its tokenizer.json, by which the engine goes: "
                "tokenizer_class is not that file's"
            )
            logger.warning(
                "transformers' %s of %s %s.",
                type(tokenizer).__name__,
                self._tokenizer_folder,
                problem,
            )
        return tokenizer

    @property
    def media_lookups(self) -> tuple[int, int]:
        """Numbers of media items that were looked for among those that the engine holds, and found
        there."""
        return (0, 0) if self._multimodal is None else self._multimodal.lookups

    def set_rules(self, rules: MultiModalRules) -> None:
        super().set_rules(rules)
        # Here, because most models read no images.
        from toolkit_lm_renderer_hf.multimodal import MultiModal

        self._multimodal = MultiModal(
            self.config, rules, self._tokenizer, self._folder, self.images, self.audio
        )
        if self._chat_template is not None:
            self._chat_template.set_media(self._multimodal.tokens, self._multimodal.texts)

    def _compile_requested(self, source: str) -> ChatTemplate:
        error = partial(RequestError, param="chat_template")
        template = ChatTemplate({"default": source}, self._special_tokens, error)
        if self._multimodal is not None:
            template.set_media(self._multimodal.tokens, self._multimodal.texts)
        return template

    def media_size(
        self, part: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        # A model that takes none refuses it.
        return (
            self._multimodal.media_size(part, options) if self._multimodal is not None else (0, 0)
        )

    def render_conversation(self, messages: Conversation, **kwargs: Any) -> Rendered:
        options = kwargs.pop("mm_processor_kwargs", None)
        for name in kwargs:
            if name not in _CHAT_OPTIONS:
                known = (*_CHAT_OPTIONS, "mm_processor_kwargs")
                raise RequestError(
                    f"render_conversation takes no option {name!r}. {nearest(name, known)}", name
                )
        source = kwargs.pop("chat_template", None)
        special = kwargs.pop("add_special_tokens", False)
        template = self._chat_template if source is None else self._requested(str(source))
        if template is None:
            raise RequestError(
                "the checkpoint has no chat template. Give one by chat_template, or use plain "
                "completions.",
                "messages",
            )
        if self._multimodal is None:
            if options:
                raise RequestError(
                    "this model takes no images or other media.", "mm_processor_kwargs"
                )
            text = template.render(messages, max_length=self._max_chars, **kwargs)
            return Rendered(self._encode(text, "messages", add_special_tokens=special))
        messages, items = self._multimodal.split(messages)
        typed = self._multimodal.typed()
        text = template.render(messages, max_length=self._max_chars, hide=typed.hide, **kwargs)
        text, tokenizer = self._multimodal.whole_text(text, typed)
        token_ids = self._encode(text, "messages", add_special_tokens=special, tokenizer=tokenizer)
        return self._multimodal.render(token_ids, items, options, self.feature_cache)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def writes_tools(self) -> bool:
        return self._chat_template is not None and self._chat_template.writes_tools

    @property
    def chat_template_source(self) -> str:
        return "" if self._chat_template is None else self._chat_template.source

    @property
    def template_names(self) -> frozenset[str] | None:
        return None if self._chat_template is None else self._chat_template.names

    def render_prompt(
        self, prompt: SingletonPrompt, *, add_special_tokens: bool = True
    ) -> Rendered:
        if isinstance(prompt, str):
            return Rendered(self._encode(prompt, "prompt", add_special_tokens=add_special_tokens))
        parsed = parse_prompt(prompt, media=self._multimodal is not None)
        if self._multimodal is not None and (items := self._multimodal.of_prompt(parsed)):
            return self._with_items(self._multimodal, parsed, items, add_special_tokens)
        token_ids = parsed.get("prompt_token_ids")
        if token_ids is not None:
            return Rendered(_not_empty(cast(list[int], token_ids), "prompt_token_ids"))
        return Rendered(
            self._encode(parsed["prompt"], "prompt", add_special_tokens=add_special_tokens)
        )

    def _with_items(
        self, multimodal: MultiModal, prompt: Any, items: list[Item], add_special_tokens: bool
    ) -> Rendered:
        options = prompt.get("mm_processor_kwargs")
        token_ids = prompt.get("prompt_token_ids")
        if token_ids is None:
            text, tokenizer = multimodal.whole_text(prompt["prompt"])
            token_ids = self._encode(
                text, "prompt", add_special_tokens=add_special_tokens, tokenizer=tokenizer
            )
            return multimodal.render(token_ids, items, options, self.feature_cache)

        def encode(text: str) -> list[int]:
            return self._encode(text, "prompt", add_special_tokens=False)

        return multimodal.render(token_ids, items, options, self.feature_cache, encode)

    def render_texts(
        self, texts: Sequence[str | tuple[str, str]], *, max_tokens: int | None = None
    ) -> list[RenderedText]:
        pairs = [(text, None) if isinstance(text, str) else text for text in texts]
        both = [text for pair in pairs for text in pair if text is not None]
        for text in both:
            self._check_text(text, "input", where="the text")
        with panics_as(_unable("input")):
            special = self._joiner.frame(
                any(second is not None for _, second in pairs)
            ).num_special_tokens
            if max_tokens is not None and max_tokens <= special:
                raise RequestError(
                    f"{max_tokens} tokens leave no room for a text beside {special} special "
                    "tokens: ask for more.",
                    "truncate_prompt_tokens",
                )
            ids = self._joiner.token_ids(both)
        joined = [
            self._joiner.join(ids[first], None if second is None else ids[second], max_tokens)
            for first, second in pairs
        ]
        for added in joined:
            _not_empty(added.token_ids, "input")
        return joined

    def cut_texts(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        room = max_tokens - self._tokenizer.num_special_tokens_to_add(False)
        if room < 1:
            raise RequestError(
                f"{max_tokens} tokens leave no room for a text beside {max_tokens - room} "
                "special tokens: ask for more.",
                "max_tokens",
            )
        for text in texts:
            self._check_text(text, "input", where="the text")
        with panics_as(_unable("input")):
            return [self._joiner.cut(text, room) for text in texts]

    def tokenized_at_once(self, text: str) -> int:
        return self._joiner.at_once(text)

    def decode_stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        return TextStream(self._detokenizer, skip_special_tokens, prompt_token_ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._detokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self._detokenizer.token_text(token_id) for token_id in token_ids]

    def token_bytes(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> list[bytes]:
        pieces = self._detokenizer.pieces
        return [
            b"".join(pieces([token_id], first=False, skip_special_tokens=skip_special_tokens))
            for token_id in token_ids
        ]

    def vocabulary_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        return list(self._eos_token_ids)

    def _encode(
        self, text: str, param: str, *, add_special_tokens: bool, tokenizer: Tokenizer | None = None
    ) -> list[int]:
        self._check_text(text, param)
        try:
            if len(text) > PIECE:
                joiner = self._joiner if tokenizer is None else Joiner(tokenizer)
                token_ids = joiner.encode(text, add_special_tokens=add_special_tokens)
            else:
                # encode() would hold the interpreter meanwhile. Without offsets, it takes two
                # thirds of the memory.
                [encoding] = (tokenizer or self._tokenizer).encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
                token_ids = encoding.ids
        except BaseException as error:
            if is_panic(error):
                raise _unable(param)(str(error)) from error
            raise
        return _not_empty(token_ids, param)

    def _check_text(self, text: str, param: str, *, where: str = "the prompt") -> None:
        if not isinstance(text, str):
            raise RequestError(f"{where} must be a text, not a {type(text).__name__}.", param)
        if not text:
            raise RequestError(f"{where} is empty.", param)
        if len(text) > self._max_chars:
            raise ContextLengthError(
                f"{where} has {len(text)} characters; no more than {self._max_chars} are "
                "tokenized.",
                param,
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{where} is not a valid text: lone surrogate at position {error.start}.", param
            ) from None


def _unable(param: str) -> Callable[[str], RequestError]:
    """Words a panic of the tokenizer, such as that of a regular expression which takes too many
    steps."""
    return lambda message: RequestError(
        f"the checkpoint's tokenizer cannot tokenize this text: {message}", param
    )


def _not_empty(token_ids: list[int], param: str) -> list[int]:
    if not token_ids:
        raise RequestError("the prompt is empty.", param)
    return token_ids
