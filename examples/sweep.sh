#!/usr/bin/env bash
# A sweep: two models, three seeds, then one table with mean and deviation.
#
#   bash examples/sweep.sh                    # further words are settings of every run
#
# Killed or preempted, the same command goes through what is missing. On a cluster, add
# hydra/launcher=submitit_slurm.
set -euo pipefail
vision train -m model=vit_mini,swin_mini seed=0,1,2 hydra.sweep.dir=outputs/sweep "$@"
vision compare outputs/sweep/*
