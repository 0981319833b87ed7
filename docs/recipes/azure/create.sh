#!/bin/bash
# A scale set of one VM: ./create.sh GROUP 10.0.0.4:/account/ckpt VNET SUBNET WHEEL
set -euo pipefail
cd "$(dirname "$0")"
group=${1:?in which resource group?}
share=${2:?which share has the checkpoints? Such as 10.0.0.4:/account/ckpt}
vnet=${3:?in which network? One that the share can be mounted from}
subnet=${4:?in which of its subnets?}
wheel=${5:?the package is missing: the URL of a wheel, with #sha256=}

custom_data=$(mktemp)
trap 'rm -f "$custom_data"' EXIT
./user-data.sh "$share" "$wheel" >"$custom_data"

# --disable-overprovision: one VM per directory.
az vmss create --resource-group "$group" --name train \
  --image Debian:debian-12:12-gen2:latest --vm-sku Standard_D8s_v5 \
  --orchestration-mode Uniform --instance-count 1 --disable-overprovision \
  --priority Spot --eviction-policy Delete --max-price -1 \
  --enable-spot-restore True --spot-restore-timeout PT1H \
  --vnet-name "$vnet" --subnet "$subnet" \
  --admin-username trainer --generate-ssh-keys \
  --custom-data "$custom_data"
