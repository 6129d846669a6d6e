"""Train: `python train.py [setting=value ...]`, the same as `vision train`."""

from vision.cli.app import run

if __name__ == "__main__":
    run("train")  # as @hydra.main does; Hydra's shell completion looks for these words
