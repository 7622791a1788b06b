from .calls import worker_method as worker_method
from .drafter import Drafter as Drafter, StepTime as StepTime
from .inputs import (
    EncoderBatch as EncoderBatch,
    GroupInputs as GroupInputs,
    StepInputs as StepInputs,
)
from .part import Feed as Feed, StepPart as StepPart, StepRun as StepRun
