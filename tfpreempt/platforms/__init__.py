"""How each platform says that a machine goes, and how to leave it: configs as data.

aws         amazon EC2 Spot: two minutes, told by the instance's metadata service
azure       Azure: Scheduled Events, from a preemption in 30 s to a reboot in 15 min
borg        borg-like platforms with TPUs: the coordinator leaves after its workers
detect      which variant of TerminationConfig this machine wants, and why
gce         Google Compute Engine: what its metadata server says of each kind of machine
kubernetes  kubernetes: SIGTERM, and SIGKILL when the pod's grace period is over
machine     what the machine itself says, without a network: firmware names, PCI devices
options     what every variant takes beside its own arguments
probing     asks the metadata servers of all clouds at once, with one deadline for all
slurm       Slurm: SIGTERM in a grace time, a requeue by exit code or by scontrol
config      terminationConfig: how a machine says that it goes, how long it leaves
"""

from __future__ import annotations
