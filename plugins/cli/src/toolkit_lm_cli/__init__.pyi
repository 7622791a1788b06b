from .app import run as run
from .early import early_process as early_process, main as main
