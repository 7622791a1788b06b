"""Request parameters for reasoning. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.plugin import ParserRegistry, Plugins

_PARAM = "thinking_token_budget"
_KNOWN: WeakKeyDictionary[Any, ParserRegistry] = WeakKeyDictionary()
_LOCK = Lock()


def _parsers(renderer: Any) -> ParserRegistry:
    """The parsers of the renderer's engine; without one, those of the plugins in its config, which
    are loaded once."""
    if renderer.plugins is not None:
        known: ParserRegistry = renderer.plugins.parsers
        return known
    with _LOCK:
        if renderer not in _KNOWN:
            _KNOWN[renderer] = Plugins.load(renderer.config.plugins).parsers
        return _KNOWN[renderer]


class ThinkingParams(ProcessorParams):
    """A budget of tokens for reasoning. The name is vLLM's."""

    changes_forward = False
    thinking_token_budget: Annotated[
        int | None,
        param(
            "Tokens of reasoning, after which its end is forced. 0: none. -1: no limit.",
            none="no limit",
            ge=-1,
        ),
    ] = None
    thinking_format: Annotated[
        str | None,
        param(
            "Answer format whose reasoning thinking_token_budget limits.",
            none="that of the chat template",
            max_length=64,
            flag=False,
        ),
    ] = None

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        if self.thinking_token_budget in (None, -1):
            return None
        # Here, because most requests ask for no budget.
        from toolkit_lm_parsers.marks import MarkedReasoning, mark_texts, shortest

        parsers = _parsers(renderer)
        try:
            name = parsers.find_format(
                "reasoning", renderer.chat_template_source, self.thinking_format or "auto"
            )
        except ConfigError as error:
            raise RequestError(str(error), "thinking_format") from error
        if name is None:
            known = ", ".join(key for key in parsers if "reasoning" in parsers.load(key).finds)
            raise RequestError(
                f"{_PARAM}: this model's chat template has no reasoning that is known here, and "
                "so nothing to end. Formats, for a server's "
                f"option reasoning_parser or for thinking_format: {known}.",
                _PARAM,
            )
        made = parsers.make(name, renderer.chat_template_source)
        if not isinstance(made, MarkedReasoning):
            raise RequestError(
                f"{_PARAM}: the answer format {name!r} states no mark that ends reasoning.", _PARAM
            )
        marks = made.marks
        texts = mark_texts(renderer, made.marks)
        forced = marks.forced or marks.end

        def token_ids(text: str) -> list[int]:
            found = shortest(
                text, texts, renderer.render_prompt(text, add_special_tokens=False).token_ids
            )
            if marks.end not in renderer.decode(found):
                raise RequestError(
                    f"{_PARAM}: the tokenizer of this model cannot write {marks.end!r}, which "
                    "ends reasoning.",
                    _PARAM,
                )
            return found

        return {
            "budget": self.thinking_token_budget,
            "marks": list(marks),
            "texts": dict(texts),
            "forced": token_ids(forced),
            "forced_again": token_ids(marks.forced_again or forced),
        }
