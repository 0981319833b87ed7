"""How each platform says that a machine goes, and how to leave it: configs as data.

config      TerminationConfig: sources, grace, exit; the generic and the Borg variant
aws         Amazon EC2 Spot: two minutes, told by the metadata service
azure       Azure: Scheduled Events, from a preemption in 30 s to a reboot in 15 min
borg        Borg-like platforms with TPUs: the coordinator leaves after its workers
gce         Google Compute Engine: what its metadata server says of each kind of machine
kubernetes  SIGTERM, and SIGKILL when the pod's grace period is over
slurm       SIGTERM in a grace time, a requeue by exit code or by scontrol
detect      which variant this machine wants, by variables, files and servers
detected    the config of a handler that was given none, or TensorFlow's own
probing     asks the metadata servers of all clouds at once, with one deadline

Imported by cli, handler, keras, tfpreempt.
"""
