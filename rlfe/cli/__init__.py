"""The commands, one file each. `rlfe.cli.main` starts, `rlfe.cli.output` prints."""
