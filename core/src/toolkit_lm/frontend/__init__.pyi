from .async_llm import AsyncLLM as AsyncLLM, EncodeOptions as EncodeOptions
from .health import Health as Health
from .llm import LLM as LLM
from .llm_engine import LLMEngine as LLMEngine
from .preparation import side_by_side as side_by_side
