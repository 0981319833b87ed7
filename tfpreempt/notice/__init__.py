"""Is this machine going away?  Sources of notices, and the watcher over them."""

from __future__ import annotations
