"""`tfpreempt run` with the arguments that follow the checkpoint directory."""

from __future__ import annotations

import sys

from tfpreempt.cli import main

main(["run", "--checkpoint-dir", *sys.argv[1:]], prog_name="tfpreempt")
