"""Prints, warns and waits when it is imported."""

import time
import warnings

print("hello from slow", flush=True)
warnings.warn("this module is old", UserWarning, stacklevel=1)
time.sleep(2.3)
