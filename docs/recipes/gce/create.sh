#!/bin/bash
# The instance template and a group of one VM: ./create.sh 10.0.0.2:/ckpt
set -euo pipefail
cd "$(dirname "$0")"
share=${1:?which share has the checkpoints? Such as 10.0.0.2:/ckpt}
zone=${ZONE:-europe-west4-a}

gcloud compute instance-templates create train \
  --machine-type=n2-standard-8 \
  --image-family=debian-12 --image-project=debian-cloud \
  --boot-disk-size=50GB \
  --provisioning-model=SPOT \
  --metadata="ckpt-share=$share" \
  --metadata-from-file=startup-script=startup.sh,train-py=train.py,train-service=train.service

# One VM: the directory belongs to one training.
gcloud compute instance-groups managed create train \
  --zone="$zone" --template=train --size=1
