"""`tfpreempt probe`: answers the probes of a controller such as Kubernetes.

command   the command
progress  the progress of a worker, as in the status of Kubeflow's TrainJob
workers   reads the status files of the workers that run in this container

Imported by no other package.
"""
