from .contract import Pooler as Pooler
from .inputs import PoolingInputs as PoolingInputs, Scoring as Scoring, TextOptions as TextOptions
