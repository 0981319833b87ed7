#!/bin/bash
# The startup script: runs as root at each boot, the first and those of another VM.
set -euo pipefail

attribute() {
  curl --fail --silent --show-error --retry 5 --header 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

if ! [ -x /opt/train/venv/bin/tfpreempt ]; then
  apt-get update
  apt-get install --yes nfs-common python3-venv
fi

# Checkpoints outlive the VM.
mkdir -p /srv/ckpt
share=$(attribute ckpt-share)
grep -q ' /srv/ckpt ' /etc/fstab ||
  echo "$share /srv/ckpt nfs hard,_netdev,nofail 0 0" >>/etc/fstab
mountpoint -q /srv/ckpt || mount /srv/ckpt

if ! [ -x /opt/train/venv/bin/tfpreempt ]; then
  python3 -m venv /opt/train/venv
  # The libtpu that this TensorFlow was built for; with the newest its import aborts.
  /opt/train/venv/bin/pip install tensorflow-tpu==2.20.0 libtpu==0.0.14 \
    /srv/ckpt/wheels/tfpreempt-*.whl
fi

attribute train-py >/opt/train/train.py
attribute train-service >/etc/systemd/system/train.service
systemctl daemon-reload
systemctl enable --now --no-block train.service
