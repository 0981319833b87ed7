#!/bin/bash
# Requests a queued TPU VM, again after each preemption: ./keep.sh 10.0.0.2:/ckpt WHEEL
set -euo pipefail
cd "$(dirname "$0")"
share=${1:?which share has the checkpoints? Such as 10.0.0.2:/ckpt}
wheel=${2:?the package is missing, such as https://host/tfpreempt-1.0-py3-none-any.whl#sha256=...}
# The checksum protects against a changed package on the server.
if ! [[ $wheel =~ ^https://[A-Za-z0-9./_~%+:-]+\.whl#sha256=[0-9a-f]{64}$ ]]; then
  echo "got the package $wheel; expected https://...whl#sha256= and 64 digits" >&2
  exit 2
fi
zone=${ZONE:-us-west4-a}

while true; do
  state=$(gcloud compute tpus queued-resources describe train \
    --zone="$zone" --format='value(state.state)' 2>/dev/null) || state=NONE
  case $state in
    SUSPENDED | FAILED)
      # Preempted: the VM is deleted, and the resource never becomes active again.
      gcloud compute tpus queued-resources delete train --zone="$zone" --force --quiet ||
        echo "not deleted; tried again in a minute" >&2
      ;;
    NONE)
      gcloud compute tpus queued-resources create train \
        --node-id=train \
        --zone="$zone" \
        --accelerator-type=v5litepod-8 \
        --runtime-version=v2-alpha-tpuv5-lite \
        --spot \
        --metadata="ckpt-share=$share,wheel=$wheel" \
        --metadata-from-file=startup-script=startup.sh,train-py=train.py,train-service=train.service ||
        echo "the request failed; retrying in a minute" >&2
      ;;
  esac
  sleep 60
done
