from .async_llm import AsyncLLM as AsyncLLM
from .llm import LLM as LLM
from .llm_engine import LLMEngine as LLMEngine
from .llm_engine import PreparedRequest as PreparedRequest
from .llm_engine import RequestOptions as RequestOptions
