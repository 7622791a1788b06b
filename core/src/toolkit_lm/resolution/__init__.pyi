from .checkpoint import (
    choose_model as choose_model,
    find_source as find_source,
    read_checkpoint as read_checkpoint,
    read_json as read_json,
)
from .no_effect import NoEffect as NoEffect, without_effect as without_effect
from .resolution import (
    choose_executor as choose_executor,
    choose_renderer as choose_renderer,
    resolve as resolve,
    resolve_configured as resolve_configured,
    resolve_device as resolve_device,
)
