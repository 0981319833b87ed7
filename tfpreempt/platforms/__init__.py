"""How every platform announces a termination, and how to exit: configs as data.

aws             Amazon EC2 Spot: two minutes, announced by the metadata service
azure           Azure: Scheduled Events, from a preemption in 30 s to a reboot in 15 min
borg            Borg-like platforms with TPUs: the coordinator exits after its workers
config          TerminationConfig: sources, grace period, exit; generic and Borg
                variants
detect          chooses the variant for this machine from variables, files and servers
detected        the config of a handler without a config, or with TensorFlow's config
gce             Google Compute Engine: notices of the metadata server for each machine
                kind
kubernetes      SIGTERM, and SIGKILL when the pod's grace period is over
metadata_probe  requests to the metadata servers of every cloud at once, with one
                deadline
slurm           SIGTERM in a grace time, a requeue by exit code or by scontrol

Imported by cli, handler, keras, tfpreempt.
"""
