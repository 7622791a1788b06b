"""vLLM's `vllm.v1.metrics.reader`: figures of an engine."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]

__getattr__ = absent(__name__)
