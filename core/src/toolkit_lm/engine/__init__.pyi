from . import wire as wire
from .client import (
    EngineClient as EngineClient,
    EngineInfo as EngineInfo,
    EngineState as EngineState,
)
from .core import EngineCore as EngineCore
from .feature_mirror import EngineFeatures as EngineFeatures
from .in_process import InProcessClient as InProcessClient
from .memory import size_kv_cache as size_kv_cache
from .process.client import ProcessClient as ProcessClient
from .process.guard import guard as guard
from .process.launch import EngineProcess as EngineProcess
from .process.stderr import StderrRelay as StderrRelay, last_words as last_words
from .start import start_engine as start_engine
from .start_up import no_garbage_collection as no_garbage_collection
