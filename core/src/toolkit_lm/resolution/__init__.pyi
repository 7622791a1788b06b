from .explanation import Explanation as Explanation
from .explanation import LayerChoice as LayerChoice
from .explanation import explain as explain
from .resolution import resolve as resolve
from .resolution import resolve_configured as resolve_configured
from .resolution import settle_device as settle_device
