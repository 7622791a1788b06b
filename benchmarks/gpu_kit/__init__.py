"""The GPU kit: one command that runs, checks and measures everything on one card, offline, in
minutes.

`bash benchmarks/gpu_kit.sh --help` says how to run it. A part is a row of `plan.py`; what a part
runs is a module beside it, which says what it finds by `report.py`.
"""
