"""Training: `loop.py` reads first; every algorithm beside it is a small pure function.

Formulas and invariants: `docs/algorithms.md`. Nothing is imported here, so that a reader of one
algorithm does not load torch.
"""
