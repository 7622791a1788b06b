from .async_llm import AsyncLLM as AsyncLLM, EncodeOptions as EncodeOptions
from .health import Health as Health
