"""Shapes of messages and tools, for the description of the API. Renderers and parsers check them,
without these classes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from toolkit_lm_server.schema_texts import Open, ShapeOf

Name = Annotated[str, Field(min_length=1)]


class MediaUrl(Open):
    url: str
    """A data URL, or an http URL of a host that the server allows."""
    detail: str | None = None
    """OpenAI's level of detail. The model's processor decides on the size."""


class InputAudio(Open):
    data: str
    """The recording, in base64."""
    format: str | None = None
    """The recording's format, such as "wav" or "mp3"."""


class MessagePart(Open):
    type: Name
    """"text", "image_url", "input_audio", "audio_url", "video_url", or another that the model's
    template knows."""
    text: str | None = None
    """The text of a part of type "text"."""
    image_url: MediaUrl | str | None = None
    """The image of a part of type "image_url"."""
    video_url: MediaUrl | str | None = None
    """The video of a part of type "video_url"."""
    audio_url: MediaUrl | str | None = None
    """The recording of a part of type "audio_url"."""
    input_audio: InputAudio | None = None
    """The recording of a part of type "input_audio"."""
    uuid: str | None = None
    """The client's own name of the media item. Alone, it stands for the item that this API key sent
    before with this name."""


class CalledFunction(Open):
    name: str
    """The function's name."""
    arguments: str | dict[str, Any] | None = None
    """JSON of an object with the arguments, or the object."""


class CalledTool(Open):
    name: str
    """The custom tool's name."""
    input: str
    """The text that it was called with."""


class EarlierCall(Open):
    id: str | None = None
    """The id that the message with the result names as `tool_call_id`."""
    type: str | None = None
    """"function" or "custom"."""
    function: CalledFunction | None = None
    """The function that was called."""
    custom: CalledTool | None = None
    """The custom tool that was called."""


class ChatMessage(Open):
    role: Name
    """"system", "developer", "user", "assistant", "tool", or another that the template knows."""
    content: str | list[MessagePart] | None = None
    """The text of the message, or its parts. null for an assistant's that only calls tools."""
    name: str | None = None
    """The author's name, for templates that show it."""
    tool_calls: list[EarlierCall] | None = None
    """Calls in a message of the assistant's."""
    tool_call_id: str | None = None
    """The call whose result a message of the role "tool" has."""
    reasoning_content: str | None = None
    """The reasoning before an assistant's text."""
    prefix: bool | None = None
    """True marks a last message of the assistant's as the beginning of the answer, which goes on
    with it. Others call it `partial`."""


class ToolFunction(Open):
    name: str
    """The function's name: letters, digits, "_", "-" and "."."""
    description: str | None = None
    """What the function does, for the model."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of the arguments. null: an object without members."""
    strict: bool | None = None
    """Arguments are of the schema, and have no other members."""


class CustomTool(Open):
    name: str
    """The tool's name, as a function's."""
    description: str | None = None
    """What the tool does, for the model."""
    format: dict[str, Any] | None = None
    """What its input must be: {"type": "text"}, or a grammar."""


class Tool(Open):
    type: str
    """"function" or "custom". Others are of vendors, and are left out."""
    function: ToolFunction | None = None
    """The function that may be called."""
    custom: CustomTool | None = None
    """The custom tool, which is called with a text."""


AnyMessage = Annotated[dict[str, Any], ShapeOf(ChatMessage)]
"""A message of a conversation. The renderer checks it."""
AnyTool = Annotated[dict[str, Any], ShapeOf(Tool)]
"""A tool. The parser of tool calls checks it."""
