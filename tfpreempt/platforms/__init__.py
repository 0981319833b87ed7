"""Configs that describe how a platform announces a termination, and how to exit.

aws             Amazon EC2 Spot: an interruption is announced two minutes ahead
azure           Azure: Scheduled Events, such as a preemption in 30 s
borg            Borg-like platforms with TPUs: the coordinator exits after the workers
config          TerminationConfig, the base class; its generic and its Borg subclass
detect          detects the platform by variables, files and metadata servers
detected        the config that is used if the user passes none, or passes TensorFlow's
gce             Google Compute Engine: a config for every kind of machine
kubernetes      Kubernetes: SIGTERM, then SIGKILL after the pod's grace period
metadata_probe  contacts the metadata servers of all clouds in parallel
slurm           Slurm: SIGTERM; a requeue is requested by the exit code or by scontrol

Imported by cli, handler, keras, tfpreempt.
"""
