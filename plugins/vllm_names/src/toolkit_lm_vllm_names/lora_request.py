"""LoRARequest: an adapter of a request, as vLLM states it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LoRARequest:
    """An adapter for `lora_request=` of `generate` and others. Its name tells it apart."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    @property
    def adapter_id(self) -> int:
        """The number."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The folder of the adapter's files."""
        return self.lora_path
