"""Entry point of `python -m tfpreempt`, equivalent to the command `tfpreempt`."""

from __future__ import annotations

from tfpreempt.cli import main

if __name__ == "__main__":
    main()
