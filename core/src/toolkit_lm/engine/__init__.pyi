from .client import (
    EngineClient as EngineClient,
    EngineInfo as EngineInfo,
    EngineState as EngineState,
)
from .core import EngineCore as EngineCore
from .start import start_engine as start_engine
