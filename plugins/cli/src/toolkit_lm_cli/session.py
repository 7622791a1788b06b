"""A conversation at a terminal: messages, and commands that begin with a slash."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer
from toolkit_lm.errors import ConfigError, ContextLengthError, RequestError, nearest

from toolkit_lm_cli.attachments import audio_parts, image_parts
from toolkit_lm_cli.conversation import Conversation
from toolkit_lm_cli.sampling import SamplingFlags
from toolkit_lm_cli.screen import Screen
from toolkit_lm_cli.talker import Talker

KEYS = "/help: commands · Alt-Enter: new line · Ctrl-C: stop an answer · Ctrl-D: end"


class Command(NamedTuple):
    """A command of a conversation."""

    usage: str
    help: str
    run: Callable[[ChatSession, str], None]


class _Timed:
    """A stream, and when its pieces came."""

    def __init__(self, stream: Iterator[str]) -> None:
        self._stream = stream
        self.start = time.monotonic()
        self.first: float | None = None

    def pieces(self) -> Iterator[str]:
        try:
            for piece in self._stream:
                if piece and self.first is None:
                    self.first = time.monotonic()
                yield piece
        finally:
            if close := getattr(self._stream, "close", None):
                close()


class ChatSession:
    """Talks with a model until the input ends."""

    def __init__(
        self, talker: Talker, conversation: Conversation, flags: SamplingFlags, screen: Screen
    ) -> None:
        self.talker = talker
        self.conversation = conversation
        self.flags = flags
        self.screen = screen
        self.is_over = False
        self.figures = ""
        """Figures of the last answer."""

    def banner(self) -> str:
        facts = self.talker.facts()
        return "\n".join([" · ".join(value for value in facts.values()), KEYS])

    def run(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.handle(line)
            if self.is_over:
                return

    def handle(self, line: str) -> None:
        """Handles a message or a command. A message that begins with a slash is written with two.
        Errors are shown, and the session goes on."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._command(line)
            elif line.strip():
                self._ask(line.removeprefix("/") if line.startswith("//") else line)
        except (RequestError, ConfigError) as error:
            self.screen.note(f"error: {error}")
        except typer.BadParameter as error:
            self.screen.note(f"error: {error.message}")

    def _command(self, line: str) -> None:
        word, _, rest = line[1:].strip().partition(" ")
        if (command := COMMANDS.get(word)) is None:
            raise RequestError(
                f"there is no command /{word}. {nearest(word, COMMANDS)} A message that begins "
                "with a slash needs two."
            )
        command.run(self, rest.strip())

    def _ask(self, text: str) -> None:
        try:
            self._answer(self.conversation.ask(text))
        except ContextLengthError as error:
            if not self.conversation.turns:
                raise
            self.screen.note(f"note: {error} What was said before is forgotten.")
            self.conversation.turns = []
            self._answer(self.conversation.ask(text))

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        timed = _Timed(self.talker.chat(messages, self.flags))
        shown = self.screen.show(timed.pieces())
        end = time.monotonic()
        if shown.text or shown.is_whole:
            self.conversation.add(messages[-1], shown.text)
        self.figures = self._figures(timed.start, timed.first, end)
        self.screen.note(self.figures if shown.is_whole else f"stopped; {self.figures}")

    def _figures(self, start: float, first: float | None, end: float) -> str:
        usage = self.talker.usage
        if usage is None or first is None:
            return f"{end - start:.1f} s"
        most = self.talker.max_model_len()
        speed = (
            f"{(usage.output - 1) / (end - first):.1f} tokens/s, "
            if usage.output > 1 and end > first
            else ""
        )
        context = f", {usage.prompt + usage.output:,} of {most:,} in context" if most else ""
        return f"{usage.output:,} tokens, {speed}first after {first - start:.2f} s{context}"

    # Commands

    def show_help(self, _: str) -> None:
        width = max(len(command.usage) for command in COMMANDS.values())
        self.screen.note(
            "\n".join(
                f"{command.usage:<{width}}  {command.help}"
                for command in dict.fromkeys(COMMANDS.values())
            )
        )

    def clear(self, _: str) -> None:
        self.conversation.clear()
        self.screen.note("what was said is forgotten.")

    def system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "none" else text
        self.screen.note(f"system message: {self.conversation.system or 'none'}")

    def set(self, text: str) -> None:
        values: dict[str, str | None] = {}
        for word in _words(text):
            name, equals, value = word.partition("=")
            if not equals:
                raise RequestError(f"write /set NAME=VALUE, not {word!r}.")
            values[name.strip().removeprefix("--").replace("-", "_")] = value or None
        flags = self.flags.updated(values)
        if flags.get("n", 1) != 1:
            raise RequestError("one answer is shown: n must be 1.")
        self.flags = flags
        shown = " ".join(f"{name}={value}" for name, value in flags.items())
        self.screen.note(shown or "all sampling parameters are the model's.")

    def save(self, text: str, *, replace: bool = False) -> None:
        self.conversation.save(_path(text), replace=replace)
        self.screen.note(f"saved in {text}")

    def load(self, text: str) -> None:
        self.conversation.load(_path(text))
        self.screen.note(f"{len(self.conversation.turns)} messages from {text}")

    def undo(self, _: str) -> None:
        asked = self.conversation.undo()
        self.screen.note(f"taken back: {_text_of(asked)}")

    def retry(self, _: str) -> None:
        conversation = self.conversation
        before = list(conversation.turns)
        attached = conversation.attached
        asked = conversation.undo()
        left = len(conversation.turns)
        try:
            self._answer([*conversation.messages, asked])
        finally:
            conversation.attached = attached
            if len(conversation.turns) == left:
                # There is no new answer.
                conversation.turns = before

    def tokens(self, _: str) -> None:
        self.screen.note(self.figures or "nothing was asked so far.")

    def image(self, text: str) -> None:
        self._attach(image_parts([_path(text)]))

    def audio(self, text: str) -> None:
        self._attach(audio_parts([_path(text)]))

    def _attach(self, parts: list[dict[str, Any]]) -> None:
        self.conversation.attached += parts
        self.screen.note(f"{len(self.conversation.attached)} file(s) go with the next message.")

    def exit(self, _: str) -> None:
        self.is_over = True


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RequestError(f"a quotation mark is missing: {error}.") from None


def _path(text: str) -> Path:
    if not text:
        raise RequestError("name a file.")
    return Path(text).expanduser()


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    parts = (
        [part.get("text", "") for part in content if part.get("type") == "text"]
        if isinstance(content, list)
        else [content]
    )
    text = " ".join(str(part) for part in parts)
    return text if len(text) <= 60 else f"{text[:60]}..."


_EXIT = Command("/exit, /quit", "End. So does Ctrl-D.", ChatSession.exit)
COMMANDS = {
    "help": Command("/help", "List the commands.", ChatSession.show_help),
    "clear": Command(
        "/clear", "Forget what was said; the system message stays.", ChatSession.clear
    ),
    "system": Command(
        "/system [TEXT]", "Set the system message, or show it. none: none.", ChatSession.system
    ),
    "set": Command(
        "/set [NAME=VALUE ...]",
        "Set sampling parameters, such as temperature=0.5, or show them. NAME=: the model's.",
        ChatSession.set,
    ),
    "save": Command(
        "/save FILE", "Write the conversation to a file. /save! replaces one.", ChatSession.save
    ),
    "save!": Command(
        "/save! FILE",
        "The same, over a file that is there.",
        lambda self, text: self.save(text, replace=True),
    ),
    "load": Command("/load FILE", "Go on with a conversation that was saved.", ChatSession.load),
    "retry": Command("/retry", "Answer the last message anew.", ChatSession.retry),
    "undo": Command("/undo", "Take the last message and its answer back.", ChatSession.undo),
    "tokens": Command(
        "/tokens",
        "Tokens and speed of the last answer, and what it takes of the context.",
        ChatSession.tokens,
    ),
    "image": Command(
        "/image FILE",
        "Send an image with the next message, to a model that sees.",
        ChatSession.image,
    ),
    "audio": Command(
        "/audio FILE",
        "Send a recording with the next message, to a model that hears.",
        ChatSession.audio,
    ),
    "exit": _EXIT,
    "quit": _EXIT,
}
