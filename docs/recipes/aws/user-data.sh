#!/bin/bash
# Prints cloud-init.yaml with the share and the two files filled in.
set -euo pipefail
cd "$(dirname "$0")"
share=${1:?which share has the checkpoints? Such as 10.0.0.2:/ckpt}

sed -e "s|@SHARE@|$share|" \
  -e "s|@TRAIN_PY@|$(base64 -w 0 train.py)|" \
  -e "s|@TRAIN_SERVICE@|$(base64 -w 0 train.service)|" \
  cloud-init.yaml
