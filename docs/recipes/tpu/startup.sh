#!/bin/bash
# The startup script: runs as root at each boot, also on a new VM.
set -euo pipefail

attribute() {
  curl --fail --silent --show-error --retry 5 --header 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

if ! [ -x /opt/train/venv/bin/tfpreempt ]; then
  apt-get update
  apt-get install --yes nfs-common python3-venv
fi

# The same user id on each machine: the owner of the checkpoints.
id train ||
  useradd --uid 20000 --home-dir /var/lib/train --shell /usr/sbin/nologin train

# Checkpoints outlive the VM.
mkdir -p /srv/ckpt
share=$(attribute ckpt-share)
grep -q ' /srv/ckpt ' /etc/fstab ||
  echo "$share /srv/ckpt nfs hard,_netdev,nofail,nosuid,nodev,noexec 0 0" >>/etc/fstab
mountpoint -q /srv/ckpt || mount /srv/ckpt

if ! [ -x /opt/train/venv/bin/tfpreempt ]; then
  python3 -m venv /opt/train/venv
  # Wheels only, which run no code here; pip verifies the checksum of tfpreempt's wheel.
  wheel=$(attribute wheel)
  /opt/train/venv/bin/pip install --only-binary :all: \
    "jax[tpu]==0.6.2" "tfpreempt @ $wheel"
fi

attribute train-py >/opt/train/train.py
attribute train-service >/etc/systemd/system/train.service
systemctl daemon-reload
systemctl enable --now --no-block train.service
