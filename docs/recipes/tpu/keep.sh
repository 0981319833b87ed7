#!/bin/bash
# Keeps one queued TPU VM asked for, until it is interrupted: ./keep.sh 10.0.0.2:/ckpt
set -euo pipefail
cd "$(dirname "$0")"
share=${1:?which share has the checkpoints? Such as 10.0.0.2:/ckpt}
zone=${ZONE:-us-west4-a}

while true; do
  state=$(gcloud compute tpus queued-resources describe train \
    --zone="$zone" --format='value(state.state)' 2>/dev/null) || state=NONE
  case $state in
    SUSPENDED | FAILED)
      # Preempted: its VM is gone, and the request is never served again.
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
        --metadata="ckpt-share=$share" \
        --metadata-from-file=startup-script=startup.sh,train-py=train.py,train-service=train.service ||
        echo "not asked for; tried again in a minute" >&2
      ;;
  esac
  sleep 60
done
