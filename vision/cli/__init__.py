"""The command line: Hydra's door, the subcommands, their help and their listings."""
