"""The engine in a process of its own: how it is launched, reached and served."""
