"""Launchers of this project: `hydra/launcher=local`, the default for `--multirun`, and `plan`."""
