"""How each platform says that a machine goes, and how to leave it: configs as data."""

from __future__ import annotations
