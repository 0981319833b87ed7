"""Lets `python -m tfpreempt` do what the command `tfpreempt` does."""

from __future__ import annotations

from tfpreempt.cli import main

if __name__ == "__main__":
    main()
