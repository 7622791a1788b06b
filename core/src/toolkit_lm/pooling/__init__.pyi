from .contract import Pooler as Pooler, PoolingMetadata as PoolingMetadata, PoolingRow as PoolingRow
from .inputs import PoolingInputs as PoolingInputs, Scoring as Scoring, TextOptions as TextOptions
