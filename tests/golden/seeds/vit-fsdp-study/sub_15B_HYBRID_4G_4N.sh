#!/bin/bash -l
# The study's script for 15 billion parameters on four nodes: its flags, and what it asks Slurm for.
#SBATCH -J test.vit
#SBATCH -t 0:25:00
#SBATCH -N 4
#SBATCH -A abc123
#SBATCH --exclusive
#SBATCH --ntasks-per-node=8
#SBATCH -o logs/vit-%x-%j.out
#SBATCH -q debug

CMD="python -u src/main_training.py \
       --model vitsmart \
       --model_size 15B \
       --strategy HYBRID_SHARD \
       --scaling_group_size 4 \
       --bs 32 \
       --image_size 224 \
"
srun --nodes=${SLURM_NNODES} --gpus-per-node=8 bash -c "source scripts/setup_fsdp.sh && $CMD"
