import sys
from pathlib import Path

# pytest's importlib mode puts no test folder on the path; the helpers beside this file are imported by name.
sys.path.insert(0, str(Path(__file__).parent))
