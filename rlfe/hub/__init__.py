"""Publishing: what a push would send, the card that describes it, the upload, its verification.

Not here: what a checkpoint is (`rlfe.checkpoints`) and what a table says (`rlfe.eval`). Try it:
`rlfe push runs/tiny_mbpp_nobuf_lr1e3 --to-folder out`.
"""
