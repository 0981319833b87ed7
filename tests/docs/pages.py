"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(f"{path.relative_to(DOCS)}" for path in DOCS.rglob("*.md"))


def read(page: str) -> str:
    """The text of a page, by its path under docs/."""
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, language: str = "python") -> list[str]:
    """Its code blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.M | re.S)
