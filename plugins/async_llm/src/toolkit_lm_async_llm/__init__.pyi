from .async_llm import AsyncLLM as AsyncLLM, EncodeOptions as EncodeOptions
from .health import Health as Health
from .preparation import side_by_side as side_by_side
