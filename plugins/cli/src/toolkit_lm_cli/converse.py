"""`toolkit chat` and `toolkit complete`: one conversation or text at a time, with a model in this
process or on a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct
from toolkit_lm.config import VllmConfig, option
from toolkit_lm.errors import ContextLengthError
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands.options import engine_command

from toolkit_lm_cli.attachments import audio_parts, image_parts
from toolkit_lm_cli.conversation import Conversation
from toolkit_lm_cli.sampling import SamplingFlags
from toolkit_lm_cli.screen import PlainScreen, Screen, make_screen
from toolkit_lm_cli.session import ChatSession
from toolkit_lm_cli.talker import Talker

_INTERRUPTED = 130


class ClientOptions(Struct, frozen=True, kw_only=True):
    """Location of the model, if it does not run in this process."""

    url: Annotated[
        str | None,
        option("Server that runs the model, such as http://127.0.0.1:8000.", none="this process"),
    ] = None
    api_key: Annotated[str | None, option("Key of the server.")] = None


_System = Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")]
_Message = Annotated[
    str | None,
    typer.Option(help="One message to answer. Default: a conversation.", metavar="TEXT"),
]
_Image = Annotated[
    list[Path] | None,
    typer.Option(
        help="Image that the first message is about, of a model that sees. May be given several "
        "times.",
        metavar="FILE",
    ),
]
_Audio = Annotated[
    list[Path] | None,
    typer.Option(
        help="Recording that the first message is about, of a model that hears. May be given "
        "several times.",
        metavar="FILE",
    ),
]
_Markdown = Annotated[bool, typer.Option(help="Show answers as Markdown. Only on a terminal.")]
_Reasoning = Annotated[
    bool, typer.Option(help="Show what the model thinks before it answers. Only on a terminal.")
]
_History = Annotated[
    bool,
    typer.Option(
        help="Keep what is entered, for the next time. Only of a conversation on a terminal."
    ),
]


@engine_command(ClientOptions)
def chat(
    ctx: typer.Context,
    config: VllmConfig,
    client: ClientOptions,
    plugins: Plugins,
    flags: SamplingFlags,
    system: _System = None,
    message: _Message = None,
    image: _Image = None,
    audio: _Audio = None,
    markdown: _Markdown = True,
    reasoning: _Reasoning = True,
    history: _History = True,
) -> None:
    """Talk with a model, in this process or on a server (--url).

    Without --message it is a conversation, in which /help lists commands. Standard input that is
    not a terminal is read as one message per line.
    """
    _refuse_many(flags)
    # A file that cannot be read is told before the model is loaded.
    conversation = Conversation(system, [*image_parts(image or ()), *audio_parts(audio or ())])
    talker = _talker(ctx, config, client, plugins)
    screen = make_screen(as_markdown=markdown, thoughts=reasoning)
    try:
        if message is not None:
            if not screen.show(talker.chat(conversation.ask(message), flags)).is_whole:
                raise typer.Exit(_INTERRUPTED)
        elif sys.stdin.isatty() and sys.stdout.isatty():
            from toolkit_lm_cli.line_editor import lines

            session = ChatSession(talker, conversation, flags, screen)
            screen.note(session.banner())
            session.run(lines(history=history))
        else:
            _converse(talker, conversation, flags, screen)
    finally:
        talker.close()


@engine_command(ClientOptions)
def complete(
    ctx: typer.Context,
    config: VllmConfig,
    client: ClientOptions,
    plugins: Plugins,
    flags: SamplingFlags,
    text: Annotated[
        str | None,
        typer.Argument(
            help="Text to complete. Default: standard input, one text per line.", metavar="TEXT"
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The same, where no MODEL is named.", metavar="TEXT")
    ] = None,
) -> None:
    """Complete a text, in this process or on a server (--url)."""
    _refuse_many(flags)
    if text is not None and prompt is not None:
        raise typer.BadParameter("there is a TEXT already.", param_hint="'--prompt'")
    first = prompt if text is None else text
    talker = _talker(ctx, config, client, plugins)
    screen = PlainScreen()
    line = None
    try:
        for line in [first] if first is not None else _lines():
            screen.show(talker.complete(line, flags))
        if line is None and not sys.stdin.isatty():
            raise typer.BadParameter(
                "there is none, and standard input has no line. A single argument is MODEL; "
                "--prompt TEXT needs none.",
                param_hint="'TEXT'",
            )
    finally:
        talker.close()


def _refuse_many(flags: SamplingFlags) -> None:
    if flags.get("n", 1) != 1:
        raise typer.BadParameter(
            "one answer is streamed: use `toolkit generate` for more.", param_hint="'--n'"
        )


def _talker(
    ctx: typer.Context, config: VllmConfig, client: ClientOptions, plugins: Plugins
) -> Talker:
    if client.url is not None:
        from toolkit_lm_cli.remote import RemoteTalker

        return RemoteTalker(client.url, client.api_key, ctx.params["model"])
    from toolkit_lm_cli.local import LocalTalker

    return LocalTalker(config, plugins)


def _converse(
    talker: Talker, conversation: Conversation, flags: SamplingFlags, screen: Screen
) -> None:
    """Each line with what was said before it; when that no longer fits, from the start, with what
    the first message had attached."""
    attached = list(conversation.attached)
    for line in _lines():
        messages = conversation.ask(line)
        try:
            shown = screen.show(talker.chat(messages, flags))
        except ContextLengthError as error:
            if not conversation.turns:
                raise
            print(f"note: {error} What was said before is forgotten.", file=sys.stderr)
            conversation.turns = []
            conversation.attached = list(attached)
            messages = conversation.ask(line)
            shown = screen.show(talker.chat(messages, flags))
        conversation.add(messages[-1], shown.text)


def _lines() -> Iterator[str]:
    """Lines that are not blank, from standard input until it ends."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives `input` line editing)

        while True:
            try:
                line = input("> ")
            except EOFError:
                print()
                return
            if line.strip():
                yield line
    yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
