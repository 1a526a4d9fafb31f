"""Tests of rlfe; `python -m tests.cases DIR` runs a folder of case families."""
