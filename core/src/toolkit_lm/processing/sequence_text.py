"""The text of one sequence as it grows, and where a stop text ends it."""

from __future__ import annotations

from toolkit_lm.params import SamplingParams
from toolkit_lm.processing.stop import StopFinder, StopTexts
from toolkit_lm.renderer import Renderer


class SequenceText:
    """What is shown is never taken back: the beginning of what could become a stop text is held back."""

    def __init__(self, params: SamplingParams, renderer: Renderer, prompt_token_ids: list[int], stops: StopTexts | None) -> None:
        self.shown: list[str] = []
        """The text so far, in pieces, as they came."""
        self.stopped_by: str | None = None
        self._held = ""
        self._finder = None if stops is None else StopFinder(stops)
        self._includes_stop = params.include_stop_str_in_output
        self._stream = renderer.decode_stream(prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    def push(self, token_ids: list[int], may_stop: bool) -> None:
        """Adds tokens; stop texts count only where `may_stop`."""
        self._add(self._stream.push(token_ids), may_stop)

    def finish(self) -> None:
        """The sequence has ended: nothing is held back any more."""
        if self.stopped_by is None:
            self._add(self._stream.flush(), may_stop=False)
        self.show_all()

    def show_all(self) -> None:
        """As `finish`, without asking the renderer again."""
        if self._held:
            self.shown.append(self._held)
            self._held = ""

    def _add(self, new: str, may_stop: bool) -> None:
        if not new:
            return
        num_held = 0
        if self._finder is not None:
            text = self._held + new
            if may_stop and (found := self._finder.find(new)) is not None:
                end, self.stopped_by = found
                end += len(self._held)
                new, self._held = text[: end if self._includes_stop else end - len(self.stopped_by)], ""
            else:
                num_held = self._finder.num_held_back
                new, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        if new:
            self.shown.append(new)
