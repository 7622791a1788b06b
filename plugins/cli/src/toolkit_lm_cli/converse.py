"""`toolkit chat` and `toolkit complete`: one conversation or text at a time, with a model in this process or on a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from msgspec import Struct
from toolkit_lm.config import VllmConfig, option
from toolkit_lm.errors import ContextLengthError, RequestError
from toolkit_lm.plugin import Plugins

from toolkit_lm_cli.attachments import image_parts, question
from toolkit_lm_cli.options import engine_command
from toolkit_lm_cli.sampling import SamplingFlags


class ClientOptions(Struct, frozen=True, kw_only=True):
    """Where the model runs, if not in this process."""

    url: Annotated[str | None, option("Server that runs the model, such as http://127.0.0.1:8000.", none="this process")] = None
    api_key: Annotated[str | None, option("Key of the server.")] = None


class Talker(Protocol):
    """A model to talk with. The streams give text as it comes, and stop the request when they are closed."""

    def chat(self, messages: list[dict[str, Any]], flags: SamplingFlags) -> Iterator[str]: ...

    def complete(self, prompt: str, flags: SamplingFlags) -> Iterator[str]: ...

    def close(self) -> None: ...


@engine_command(ClientOptions)
def chat(
    ctx: typer.Context,
    config: VllmConfig,
    client: ClientOptions,
    plugins: Plugins,
    flags: SamplingFlags,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    message: Annotated[str | None, typer.Option(help="One message to answer. Default: a conversation.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Image that the first message is about, of a model that sees. May be given several times.", metavar="FILE"),
    ] = None,
) -> None:
    """Talk with a model, in this process or on a server (--url).

    Without --message it is a conversation. Standard input that is not a terminal is read as one message per line.
    """
    _refuse_many(flags)
    # A file that cannot be read is told before the model is loaded.
    images = image_parts(image or ())
    talker = _talker(ctx, config, client, plugins)
    try:
        messages = [{"role": "system", "content": system}] if system else []
        if message is not None:
            _answer(talker, [*messages, question(message, images)], flags)
        else:
            _converse(talker, messages, images, flags)
    finally:
        talker.close()


@engine_command(ClientOptions)
def complete(
    ctx: typer.Context,
    config: VllmConfig,
    client: ClientOptions,
    plugins: Plugins,
    flags: SamplingFlags,
    prompt: Annotated[str | None, typer.Option(help="Text to complete. Default: standard input, one text per line.")] = None,
) -> None:
    """Complete a text, in this process or on a server (--url)."""
    _refuse_many(flags)
    talker = _talker(ctx, config, client, plugins)
    try:
        for text in [prompt] if prompt is not None else _lines():
            _print(talker.complete(text, flags))
    finally:
        talker.close()


def _refuse_many(flags: SamplingFlags) -> None:
    if flags.get("n", 1) != 1:
        raise typer.BadParameter("one answer is streamed: use `toolkit generate` for more.", param_hint="'--n'")


def _talker(ctx: typer.Context, config: VllmConfig, client: ClientOptions, plugins: Plugins) -> Talker:
    if client.url is not None:
        from toolkit_lm_cli.remote import RemoteTalker

        return RemoteTalker(client.url, client.api_key, ctx.params["model"])
    from toolkit_lm_cli.local import LocalTalker

    return LocalTalker(config, plugins)


def _converse(talker: Talker, start: list[dict[str, Any]], images: list[dict[str, Any]], flags: SamplingFlags) -> None:
    """Each line with what was said before it; when that no longer fits, from the start. At a terminal, ^C stops an answer.

    `images`: of the first message, wherever the conversation starts.
    """
    interactive = sys.stdin.isatty()
    messages = start
    for line in _lines():
        asked = question(line, images if messages is start else ())
        try:
            try:
                answer = _answer(talker, [*messages, asked], flags)
            except ContextLengthError as error:
                if messages is start:
                    raise
                print(f"note: {error} What was said before is forgotten.", file=sys.stderr)
                messages, asked = start, question(line, images)
                answer = _answer(talker, [*messages, asked], flags)
        except RequestError as error:
            if not interactive:
                raise
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
        else:
            messages = [*messages, asked, {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    """Lines that are not blank, from the terminal or from standard input, until it ends."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401  (gives `input` line editing)

    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if line.strip():
            yield line


def _answer(talker: Talker, messages: list[dict[str, Any]], flags: SamplingFlags) -> str:
    return _print(talker.chat(messages, flags))


def _print(stream: Iterator[str]) -> str:
    pieces = []
    for piece in stream:
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return "".join(pieces)
