"""Tasks: problems, prompts and judging. `base.py` says what a task is; `BY_NAME` lists them."""
