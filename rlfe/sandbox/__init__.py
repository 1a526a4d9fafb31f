"""Running programs that nobody vouches for: jail, fork server, typed results, pool.

`rlfe.sandbox.pool.Judge` is the entrance; `inside/` is what runs in the jail.
"""
