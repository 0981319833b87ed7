#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1 --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train.log

# exec: signals in the grace time go to the task; the batch shell would hear them late.
exec srun python train.py
