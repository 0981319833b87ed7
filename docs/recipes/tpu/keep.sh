#!/bin/bash
# Creates a Spot TPU VM, again after each preemption: ./keep.sh 10.0.0.2:/ckpt WHEEL
set -euo pipefail
cd "$(dirname "$0")"
share=${1:?which share has the checkpoints? Such as 10.0.0.2:/ckpt}
wheel=${2:?the package is missing, such as https://host/tfpreempt-1.0-py3-none-any.whl#sha256=...}
# The checksum protects against a changed package on the server.
if ! [[ $wheel =~ ^https://[A-Za-z0-9./_~%+:-]+\.whl#sha256=[0-9a-f]{64}$ ]]; then
  echo "got the package $wheel; expected https://...whl#sha256= and 64 digits" >&2
  exit 2
fi
zone=${ZONE:-europe-west4-a}

while true; do
  state=$(gcloud compute instances describe train \
    --zone="$zone" --format='value(status)' 2>/dev/null) || state=NONE
  case $state in
    TERMINATED)
      # A stopped Spot VM with a TPU is not started again.
      gcloud compute instances delete train --zone="$zone" --quiet ||
        echo "not deleted; tried again in a minute" >&2
      ;;
    NONE)
      gcloud compute instances create train \
        --zone="$zone" \
        --machine-type=ct6e-standard-8t \
        --image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e \
        --image-project=ubuntu-os-accelerator-images \
        --boot-disk-size=100GB \
        --provisioning-model=SPOT \
        --instance-termination-action=DELETE \
        --maintenance-policy=TERMINATE \
        --metadata="ckpt-share=$share,wheel=$wheel" \
        --metadata-from-file=startup-script=startup.sh,train-py=train.py,train-service=train.service ||
        echo "the request failed; retrying in a minute" >&2
      ;;
  esac
  sleep 60
done
