"""The growing text of one sequence, and the detection of stop texts in it."""

from __future__ import annotations

from toolkit_lm.params import SamplingParams
from toolkit_lm.processing.stop import StopFinder, StopTexts
from toolkit_lm.renderer import Renderer, StopScope


class SequenceText:
    """Text of a sequence. Shown text is never taken back, so the beginning of a possible stop text
    is held back."""

    def __init__(
        self,
        params: SamplingParams,
        renderer: Renderer,
        prompt_token_ids: list[int],
        stops: StopTexts | None,
        scope: StopScope | None = None,
    ) -> None:
        """`scope`: parts of the text in which `stops` apply; None: everywhere."""
        self.shown: list[str] = []
        """The shown text so far, in pieces, as they came."""
        self.stopped_by: str | None = None
        self._held = ""
        """Text that may begin a stop text."""
        self._unsorted = ""
        """Text after `_held` for which the scope does not know yet whether stop texts apply."""
        self._num_early = 0
        """Number of characters of `_unsorted` that came before the sequence could stop."""
        self._finder = None if stops is None else StopFinder(stops)
        self._scope = None if stops is None else scope
        self._includes_stop = params.include_stop_str_in_output
        self._stream = renderer.decode_stream(
            prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )

    def push(self, token_ids: list[int], may_stop: bool) -> None:
        """Adds tokens. Stop texts apply only if `may_stop`."""
        new = self._stream.push(token_ids)
        if self._scope is None:
            self._add(new, may_stop)
        elif new:
            self._sort(new, self._scope.push(new), may_stop)

    def finish(self, may_stop: bool) -> None:
        """Ends the sequence, and shows all text held back. `may_stop`: as in the last `push`."""
        if self.stopped_by is None:
            rest = self._stream.flush()
            if self._scope is None:
                self._add(rest, may_stop=False)
            else:
                self._sort(rest, self._scope.push(rest) + self._scope.finish(), may_stop)
        self.show_all()

    def show_all(self) -> None:
        """Shows all text held back without another call of the renderer."""
        if rest := self._held + self._unsorted:
            self.shown.append(rest)
            self._held = self._unsorted = ""

    def _sort(self, new: str, parts: list[tuple[int, bool]], may_stop: bool) -> None:
        """Adds the parts that the scope knows."""
        self._unsorted += new
        if not may_stop:
            self._num_early = len(self._unsorted)
        for length, counts in parts:
            early = min(length, self._num_early)
            self._num_early -= early
            for size, is_late in ((early, False), (length - early, True)):
                part, self._unsorted = self._unsorted[:size], self._unsorted[size:]
                self._add(part, is_late and counts)
                if self.stopped_by is not None:
                    self._unsorted = ""
                    return

    def _add(self, new: str, may_stop: bool) -> None:
        if not new:
            return
        num_held = 0
        if self._finder is not None:
            text = self._held + new
            if not may_stop:
                self._finder.forget()
            if may_stop and (found := self._finder.find(new)) is not None:
                end, self.stopped_by = found
                end += len(self._held)
                new = text[: end if self._includes_stop else end - len(self.stopped_by)]
                self._held = ""
            else:
                num_held = self._finder.num_held_back
                new = text[: len(text) - num_held]
                self._held = text[len(text) - num_held :]
        if new:
            self.shown.append(new)
