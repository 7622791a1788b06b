"""What keeps a prompt from being rendered that is not the prompt's fault."""

from __future__ import annotations

from toolkit_lm.errors import ToolkitError


class RenderServerError(ToolkitError):
    """Base of both. The request may succeed later."""

    http_status = 503
    code = "renderer_failed"


class UnreachableError(RenderServerError):
    """No render server answered in time."""

    http_status = 503
    code = "renderer_unreachable"


class BadAnswerError(RenderServerError):
    """A render server answered with what is no rendered prompt, and no other one did better."""

    http_status = 502
    code = "renderer_bad_answer"
