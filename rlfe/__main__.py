"""`python -m rlfe`, the form that torchrun needs."""

from rlfe.cli.main import main

if __name__ == "__main__":
    main()
