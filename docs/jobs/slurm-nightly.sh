#!/bin/bash
# Every night by scrontab:   0 2 * * * sbatch /shared/vllm-tune/slurm-nightly.sh
#SBATCH --job-name=vllm-nightly
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=1
#SBATCH --time=08:00:00
# Nights are comparable on one machine only: always the same node.
#SBATCH --nodelist=gpu-node-1
# Five minutes before the limit: servers are stopped, everything is kept, the next job goes on with the same night.
#SBATCH --signal=B:TERM@300
#SBATCH --output=vllm-nightly-%j.log
set -euo pipefail
cd /shared/vllm-tune
source venv/bin/activate
# `exec`, so that the signal reaches the tuner itself.
exec tune nightly --profile nightly.yaml --junit "nightly-${SLURM_JOB_ID}.xml" --markdown "nightly-${SLURM_JOB_ID}.md"
