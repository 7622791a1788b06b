from .checkpoint import read_checkpoint as read_checkpoint
from .explanation import Explanation as Explanation, LayerChoice as LayerChoice, explain as explain
from .resolution import resolve as resolve, resolve_configured as resolve_configured, resolve_device as resolve_device
