"""Score templates: the one text that a reranker made of a language model reads in place of a query
and a document. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from toolkit_lm.errors import ConfigError, ContextLengthError, RequestError
from toolkit_lm.prompts import Scored
from toolkit_lm.renderer import RenderedText, Renderer

from toolkit_lm_pooling_adapters.media import parts_of

_PLACE = re.compile(r"\{(query|document|instruction)\}")
_DOCUMENT = "{document}"
_PARTS = "{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}"
"""A chat template that writes a message's parts one after the other."""


class ScoreTemplate(Struct, frozen=True, kw_only=True):
    """A prompt with the places {query}, {document} and, if the model takes one, {instruction}.
    Other braces are plain text.

    Raises ConfigError for a place that is missing or in the wrong piece.
    """

    pieces: tuple[str, ...]
    """Are tokenized apart, as in the training of models whose authors do so, and joined. One piece
    ends with {document}: where a prompt is too long, its end is cut.
    """
    instruction: str = ""
    """Stands for that of a request that brings none."""
    instruction_text: str = "{instruction}"
    """How an instruction is written where {instruction} stands; nothing is written where there is
    none."""
    add_special_tokens: bool = False
    """The tokenizer's special tokens (such as the one that begins a text) are put around the
    whole."""
    classifier_method: str | None = None
    """The option that its reranker scores with, where the classifier is made of the
    language-modeling head."""
    classifier_tokens: tuple[str, ...] = ()
    """Words for the option classifier_tokens, to go with classifier_method."""

    def __post_init__(self) -> None:
        text = "".join(self.pieces)
        for place in ("{query}", _DOCUMENT):
            if text.count(place) != 1:
                raise ConfigError(
                    f"a score template must have {place} once, but this one has it "
                    f"{text.count(place)} times."
                )
        if not self.pieces[self.document_piece].endswith(_DOCUMENT):
            raise ConfigError(
                f"a piece of a score template must end with {_DOCUMENT}, so that it can be cut "
                "there."
            )

    @property
    def document_piece(self) -> int:
        """The number of the piece that ends with the document."""
        return next(index for index, piece in enumerate(self.pieces) if _DOCUMENT in piece)

    @property
    def takes_instruction(self) -> bool:
        return any("{instruction}" in piece for piece in self.pieces)

    def render(self, query: str, document: str, instruction: str | None = None) -> list[str]:
        """The pieces, with their places filled. What is filled in is not looked into for places."""
        written = self._written(instruction)
        values = {"query": query, "document": document, "instruction": written}
        return [_PLACE.sub(lambda place: values[place[1]], piece) for piece in self.pieces]

    def parts(
        self,
        query: list[Mapping[str, Any]],
        document: list[Mapping[str, Any]],
        instruction: str | None = None,
    ) -> list[Mapping[str, Any]]:
        """The whole as content parts of a message, with the parts of both sides in their places."""
        values: dict[str, list[Mapping[str, Any]]] = {
            "query": query,
            "document": document,
            "instruction": [{"type": "text", "text": self._written(instruction)}],
        }
        parts: list[Mapping[str, Any]] = []
        # Texts and names of places take turns.
        for index, text in enumerate(_PLACE.split("".join(self.pieces))):
            parts += values[text] if index % 2 else [{"type": "text", "text": text}]
        return parts

    def _written(self, instruction: str | None) -> str:
        text = instruction or self.instruction
        return self.instruction_text.replace("{instruction}", text) if text else ""


def score_prompt(
    template: ScoreTemplate, query: str, document: str, instruction: str | None = None
) -> str:
    """The whole text, for people to read: `score_tokens` is what models read."""
    return "".join(template.render(query, document, instruction))


def score_tokens(
    renderer: Renderer,
    template: ScoreTemplate,
    query: str,
    document: str,
    instruction: str | None = None,
    *,
    max_tokens: int | None = None,
) -> list[int]:
    """The token ids of a query and a document. Of what is longer than `max_tokens`, the end of the
    document is cut.

    Raises RequestError for a text that cannot be rendered or is empty, and where all but the
    document is too long already.
    """
    _check(query, document, instruction)
    pieces = template.render(query, document, instruction)
    cut = template.document_piece
    first = next(filter(None, pieces))
    before, after = (
        _special_tokens(renderer, first)
        if template.add_special_tokens or max_tokens is not None
        else ([], [])
    )
    tokens = [
        [] if max_tokens is not None and index == cut else _tokens(renderer, piece)
        for index, piece in enumerate(pieces)
    ]
    opening, closing = (before, after) if template.add_special_tokens else ([], [])
    if max_tokens is not None:
        head = _tokens(renderer, template.render(query, "", instruction)[cut])
        room = max_tokens - sum(map(len, tokens)) - len(opening) - len(closing)
        if room > 0:
            whole = renderer.render_texts(
                [pieces[cut]], max_tokens=room + len(before) + len(after)
            )[0].token_ids
            tokens[cut] = whole[len(before) : len(whole) - len(after)]
        # Where the room ends before the document, what is kept is a beginning of what stands before
        # it in its piece.
        if room < 1 or (len(tokens[cut]) == room and tokens[cut] == head[:room]):
            taken = max_tokens - room + len(head)
            raise ContextLengthError(
                f"the query and the score template take {taken} tokens, but {max_tokens} are "
                "allowed: ask for more, or shorten the query.",
                "truncate_prompt_tokens",
            )
    return [*opening, *(token for piece in tokens for token in piece), *closing]


def score_media(
    renderer: Renderer,
    template: ScoreTemplate,
    query: Scored,
    document: Scored,
    instruction: str | None = None,
) -> RenderedText:
    """The token ids and items of a query and a document, of which a side has media. All of the text
    is tokenized at once.

    Raises RequestError for a side that cannot be rendered or is empty.
    """
    _check(query, document, instruction)
    parts = template.parts(parts_of(query), parts_of(document), instruction)
    rendered = renderer.render_conversation(
        [{"role": "user", "content": parts}],
        chat_template=_PARTS,
        add_generation_prompt=False,
        add_special_tokens=template.add_special_tokens,
    )
    return RenderedText(rendered.token_ids, features=rendered.features)


def read_score_template(path: Path) -> ScoreTemplate:
    """A template from a file. It is tokenized in two pieces: to the end of the document, and what
    follows.

    A last line break is not part of it. Raises ConfigError.
    """
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"score_template {str(path)!r} cannot be read: {error}") from error
    head, place, tail = text.partition(_DOCUMENT)
    try:
        return ScoreTemplate(pieces=(head + place, tail), add_special_tokens=True)
    except ConfigError as error:
        raise ConfigError(f"score_template {str(path)!r}: {error}") from None


def _check(query: Scored, document: Scored, instruction: str | None) -> None:
    for name, text in (("query", query), ("document", document)):
        if not text:
            raise RequestError(f"the {name} is empty.", "input")
    if instruction is not None and not isinstance(instruction, str):
        raise RequestError(
            f"the instruction must be a text, not a {type(instruction).__name__}.", "instruction"
        )


def _tokens(renderer: Renderer, piece: str) -> list[int]:
    return renderer.render_prompt(piece, add_special_tokens=False).token_ids if piece else []


def _special_tokens(renderer: Renderer, text: str) -> tuple[list[int], list[int]]:
    """Special tokens that the tokenizer puts before and after a text."""
    plain, whole = (
        renderer.render_prompt(text, add_special_tokens=added).token_ids for added in (False, True)
    )
    start = next(
        (i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain), 0
    )
    return whole[:start], whole[start + len(plain) :]
