#!/bin/bash
# The instance template and a group of one VM: ./create.sh 10.0.0.2:/ckpt WHEEL
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

gcloud compute instance-templates create train \
  --machine-type=n2-standard-8 \
  --image-family=debian-12 --image-project=debian-cloud \
  --boot-disk-size=50GB \
  --provisioning-model=SPOT \
  --metadata="ckpt-share=$share,wheel=$wheel" \
  --metadata-from-file=startup-script=startup.sh,train-py=train.py,train-service=train.service

# One VM: one run per directory.
gcloud compute instance-groups managed create train \
  --zone="$zone" --template=train --size=1
