from .draft_chain import DraftChain as DraftChain
from .drafting import DraftingPart as DraftingPart
from .encoder import EncoderPart as EncoderPart, HasEncoder as HasEncoder
from .media import (
    EncoderSequences as EncoderSequences,
    MediaPart as MediaPart,
    ReadsMedia as ReadsMedia,
)
from .pooling import PoolingPart as PoolingPart
