#!/usr/bin/env bash
# Trains on hosts of a Slurm cluster: `sbatch deploy/slurm.sh`. docs/clusters.md explains it.
#SBATCH --job-name=meshwork
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --distribution=block
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
set -euo pipefail

# A folder that all hosts see.
run=${RUN:-$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_NAME}
mkdir -p "$run"
export MESHWORK_THREADS=$SLURM_CPUS_PER_TASK

# `srun --mpi=list` shows what the cluster has: pmix for Open MPI, pmi2 for MPICH and Intel MPI.
# comm.kind=mpi refuses to train as four runs of one process, whatever hides the variables of srun.
# A job that is requeued goes on from its last checkpoint.
srun --mpi="${MPI:-pmix}" --kill-on-bad-exit=1 "${GPT_TRAIN:-./target/release/examples/gpt_train}" \
  --mesh "${MESH:-dp=2,tp=2}" --steps "${STEPS:-1000}" --metrics "$run/metrics.jsonl" \
  --set comm.kind=mpi \
  --set comm.log_dir="$run/logs" \
  --set checkpoint.dir="$run/checkpoints" --set checkpoint.every=100 --set checkpoint.resume=true \
  "$@"
