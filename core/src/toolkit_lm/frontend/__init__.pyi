from .async_llm import AsyncLLM as AsyncLLM
from .llm import LLM as LLM
from .llm_engine import LLMEngine as LLMEngine
