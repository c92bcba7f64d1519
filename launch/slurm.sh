#!/usr/bin/env bash
# Runs `dagrl launch` on the machines of a Slurm job, one task per machine:
#
#   sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sh pipeline.yaml [key=value ...] [--run-dir DIR]
#
# dagrl must be on PATH. The pipeline, its data and the run folder must be in folders that all machines share. Two
# minutes before the time limit Slurm sends SIGTERM: the run saves and stops, and the same command continues from there.
#SBATCH --job-name=dagrl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@120
set -euo pipefail

if [[ $# -eq 0 || -z "${SLURM_JOB_ID:-}" ]]; then
    echo "usage: sbatch --nodes=N --gpus-per-node=G $0 pipeline.yaml [key=value ...] [--run-dir DIR]" >&2
    exit 2
fi

machines=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
PET_MASTER_ADDR=${machines%%$'\n'*}
# Jobs that share a machine need different ports.
PET_MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
PET_NNODES=$SLURM_JOB_NUM_NODES
PET_NPROC_PER_NODE=${SLURM_GPUS_ON_NODE:-auto}
# Slurm passes it to the tasks in the environment; no command line shows it.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export PET_MASTER_ADDR PET_MASTER_PORT PET_NNODES PET_NPROC_PER_NODE RAY_AUTH_TOKEN

# Without --kill-on-bad-exit, the other machines have time to save; rank 0 ends them.
# shellcheck disable=SC2016  # each task expands its own SLURM_PROCID
exec srun --ntasks="$PET_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=0 \
    bash -c 'PET_NODE_RANK=$SLURM_PROCID exec dagrl launch "$@"' dagrl "$@"
