"""What runs inside the jail: the fork server, the harness of one program, the typed encoding.

Standard library only, and nothing of rlfe outside this package is imported: the process that
runs it lives beside hostile programs and never holds an expected value.
"""
