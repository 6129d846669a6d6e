"""Evaluate a checkpoint: `python eval.py checkpoint=outputs/...`, the same as `vision eval`."""

from vision.cli.app import run

if __name__ == "__main__":
    run("eval")  # as @hydra.main does; Hydra's shell completion looks for these words
