from .limits import RequestLimits as RequestLimits
from .multimodal import check_placeholders as check_placeholders, cut_features as cut_features
from .parts import RequestHalf as RequestHalf
from .pooling_processor import PoolingProcessor as PoolingProcessor
from .pooling_requests import all_prepared as all_prepared, params_of_each as params_of_each
from .pooling_state import AnyState as AnyState
from .processor import Processor as Processor, text_of as text_of
from .request_state import RequestState as RequestState
from .requests import (
    PreparedRequest as PreparedRequest,
    RenderedPrompt as RenderedPrompt,
    RequestOptions as RequestOptions,
)
from .validation import (
    check_bounds as check_bounds,
    check_token_ids as check_token_ids,
    cut_prompt as cut_prompt,
)
