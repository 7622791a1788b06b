from .llm import LLM as LLM
from .llm_engine import LLMEngine as LLMEngine
