"""Configs that describe how a platform announces a termination, and how to exit.

aws             Amazon EC2 Spot: the metadata service announces two minutes
azure           Azure: Scheduled Events, such as a preemption in 30 s
borg            Borg-like platforms with TPUs: the coordinator exits after its workers
config          TerminationConfig, the base class; generic and Borg variants
detect          detects the platform by variables, files and metadata servers
detected        the config if the user passes none, or TensorFlow's config
gce             Google Compute Engine: a config for every kind of machine
kubernetes      Kubernetes: SIGTERM, then SIGKILL after the pod's grace period
metadata_probe  contacts the metadata servers of all clouds in parallel
slurm           Slurm: SIGTERM, and a requeue by the exit code or by scontrol

Imported by cli, handler, keras, tfpreempt.
"""
