"""A renderer that asks render servers elsewhere: `toolkit render`, or whatever speaks its protocol.
No torch, no tokenizer library."""

from msgspec import Struct
from toolkit_lm.plugin import RendererRegistry, hookimpl


class Options(Struct, frozen=True):
    """`--plugin-option renderer_remote.NAME=...`"""

    timeout: float = 30.0
    """Seconds within which a render server must have answered. Then the next one is asked."""
    connect_timeout: float = 2.0
    """Seconds to reach a render server."""
    api_key: str | None = None
    """Key of the render servers."""
    max_answer_size: str = "1GiB"
    """Most that an answer with media may have; a request with more is refused. One picture's arrays
    may be 300 MiB.

    Answers without media are held to what their tokens need.
    """


@hookimpl
def toolkit_register_renderers(renderers: RendererRegistry) -> None:
    renderers.add(
        "remote",
        "toolkit_lm_renderer_remote.renderer:RemoteRenderer",
        reads=(),
        asks_servers=True,
    )
