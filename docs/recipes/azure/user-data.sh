#!/bin/bash
# Prints cloud-init.yaml with the share, the package and the two files.
set -euo pipefail
cd "$(dirname "$0")"
share=${1:?which share has the checkpoints? Such as 10.0.0.2:/ckpt}
wheel=${2:?the package is missing, such as https://host/tfpreempt-1.0-py3-none-any.whl#sha256=...}
# The checksum protects against a changed package on the server.
if ! [[ $wheel =~ ^https://[A-Za-z0-9./_~%+:-]+\.whl#sha256=[0-9a-f]{64}$ ]]; then
  echo "got the package $wheel; expected https://...whl#sha256= and 64 digits" >&2
  exit 2
fi

sed -e "s|@SHARE@|$share|" \
  -e "s|@WHEEL@|$wheel|" \
  -e "s|@TRAIN_PY@|$(base64 -w 0 train.py)|" \
  -e "s|@TRAIN_SERVICE@|$(base64 -w 0 train.service)|" \
  cloud-init.yaml
