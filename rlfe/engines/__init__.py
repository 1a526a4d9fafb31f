"""Engines: what samples and what learns. `base.py` draws the boundary."""
