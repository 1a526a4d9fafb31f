"""Evaluation: sample what is missing, judge it, count it, and state it with its uncertainty.

Read `runner.py` first. `passk.py` and `statistics.py` are pure functions; `store.py` is what makes
an evaluation resumable; `tables.py` and `plots.py` write what people read.
"""
