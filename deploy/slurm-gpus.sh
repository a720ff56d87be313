#!/usr/bin/env bash
# Trains on the GPUs of hosts of a Slurm cluster, without MPI: `sbatch deploy/slurm-gpus.sh`. docs/clusters.md explains
# it.
#SBATCH --job-name=meshwork
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
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

# Where the processes meet: the first host of the job, at a port that follows from its number, below those that hosts
# give to connections.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
export MASTER_ADDR MASTER_PORT

# Each task sees all GPUs of its host, and takes the one of its number there: do not bind GPUs to tasks.
# A job that is requeued goes on from its last checkpoint.
srun --kill-on-bad-exit=1 --gpu-bind=none "${GPT_TRAIN:-./target/release/examples/gpt_train}" \
  --device cuda --mesh "${MESH:-dp=2,tp=8}" --steps "${STEPS:-1000}" --metrics "$run/metrics.jsonl" \
  --set comm.kind=tcp \
  --set comm.log_dir="$run/logs" \
  --set checkpoint.dir="$run/checkpoints" --set checkpoint.every=100 --set checkpoint.resume=true \
  "$@"
