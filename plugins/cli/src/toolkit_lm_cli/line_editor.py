"""Lines from a terminal: with history, completion of commands, and messages of several lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit_lm_cli.session import COMMANDS

if TYPE_CHECKING:
    from prompt_toolkit.history import History

_PROMPT = "> "
_CONTINUED = "… "
_MOST_HISTORY = 2**20
_FILES = ("/save ", "/save! ", "/load ", "/image ", "/audio ")


def lines(*, history: bool) -> Iterator[str]:
    """Lines that a user enters, until Ctrl-D. Ctrl-C discards the line being written."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.keys import Keys

    bindings = KeyBindings()

    @bindings.add(Keys.Enter)
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if (
            buffer.document.text_before_cursor.endswith("\\")
            and not buffer.document.text_after_cursor
        ):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add(Keys.Escape, Keys.Enter)
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        multiline=True,
        key_bindings=bindings,
        history=_history() if history else None,
        completer=_completer(),
        complete_while_typing=False,
        prompt_continuation=_CONTINUED,
        enable_suspend=True,
    )
    while True:
        try:
            line = session.prompt(_PROMPT)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line.strip():
            yield line.strip("\n")


def _completer() -> Any:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class Commands(Completer):
        """Commands at the beginning of a message, and the files that they take."""

        def get_completions(self, document: Document, complete_event: Any) -> Iterable[Completion]:
            text = document.text_before_cursor
            if text.startswith("/") and " " not in text:
                yield from (
                    Completion(f"/{name}", -len(text))
                    for name in COMMANDS
                    if f"/{name}".startswith(text)
                )
            elif found := next((start for start in _FILES if text.startswith(start)), None):
                path = Document(text.removeprefix(found))
                yield from PathCompleter(expanduser=True).get_completions(path, complete_event)

    return Commands()


def _history() -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    folder = (
        Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "toolkit-lm"
    )
    path = folder / "chat_history"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Only the user may read the conversation.
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        _shorten(path)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _shorten(path: Path) -> None:
    """Leaves the later half of a history that has become long."""
    if path.stat().st_size > _MOST_HISTORY:
        data = path.read_bytes()
        begin = data.find(b"\n# ", len(data) // 2)
        path.write_bytes(data[begin:] if begin >= 0 else b"")
