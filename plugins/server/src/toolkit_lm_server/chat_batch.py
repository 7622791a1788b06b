"""Several conversations in one request."""

from __future__ import annotations

from typing import Any

from toolkit_lm.errors import RequestError

from toolkit_lm_server.fields import Items
from toolkit_lm_server.message_schemas import AnyMessage
from toolkit_lm_server.protocol import ChatBody, examples


class ChatBatchBody(ChatBody):
    """POST /v1/chat/completions/batch: several conversations. Each is answered like a request of
    its own."""

    model_config = examples(
        {
            "messages": [
                [{"role": "user", "content": "Hi!"}],
                [{"role": "user", "content": "Bye!"}],
            ],
            "max_tokens": 8,
        }
    )

    messages: Items[Items[AnyMessage]]  # type: ignore[assignment]
    """The conversations."""

    def conversations(self, most: int) -> list[list[dict[str, Any]]]:
        for name in ("stream", "prompt_logprobs"):
            if getattr(self, name):
                raise RequestError(
                    f"{name} is not supported for several conversations: send each to "
                    "/v1/chat/completions.",
                    name,
                )
        if not 1 <= len(self.messages) <= most:
            raise RequestError(
                f"messages has {len(self.messages):,} conversations: give 1 to {most:,}.",
                "messages",
            )
        if not all(self.messages):
            raise RequestError(
                f"messages[{self.messages.index([])}] is a conversation without messages.",
                "messages",
            )
        return self.messages
