"""rlfe (RL Forgetting Experiments): train, evaluate and publish RL runs, and see what they forget.

Importing this package loads nothing heavy. Start at `rlfe.training.loop` for the algorithm,
`rlfe.cli` for the commands.
"""

__version__ = "0.1.0"
