"""Errors of rendering that are not the prompt's fault."""

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
    """A render server's answer was not a rendered prompt, and the other servers did not do
    better."""

    http_status = 502
    code = "renderer_bad_answer"
