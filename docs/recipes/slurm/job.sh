#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1 --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train.log

# exec: the task receives signals at once; Slurm signals the batch shell later.
exec srun python train.py
