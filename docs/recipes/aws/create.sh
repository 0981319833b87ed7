#!/bin/bash
# The launch template and a group of one instance:
# ./create.sh 10.0.0.2:/ subnet-1,subnet-2 https://host/tfpreempt-1.0-...whl#sha256=...
set -euo pipefail
cd "$(dirname "$0")"
share=${1:?which share has the checkpoints? Such as 10.0.0.2:/}
subnets=${2:?in which subnets? Such as subnet-1,subnet-2}
wheel=${3:?the package is missing: the URL of a wheel, with #sha256=}

user_data=$(./user-data.sh "$share" "$wheel" | base64 -w 0)
aws ec2 create-launch-template --launch-template-name train \
  --launch-template-data "$(sed "s|@USER_DATA@|$user_data|" launch-template.json)"
aws autoscaling create-auto-scaling-group \
  --cli-input-json file://group.json --vpc-zone-identifier "$subnets"
