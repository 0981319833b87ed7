"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path

import markdown

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(f"{path.relative_to(DOCS)}" for path in DOCS.rglob("*.md"))


def read(page: str) -> str:
    """The text of a page, by its path under docs/."""
    return (DOCS / page).read_text(encoding="utf-8")


def every_block(text: str) -> list[str]:
    """Returns all code blocks of a text, in any language."""
    return re.findall(r"^```\w+\n(.*?)^```$", text, re.M | re.S)


def unlabelled_blocks(text: str) -> list[str]:
    """Returns code blocks without a language: indented blocks, and bare fences."""
    extensions = ["admonition", "fenced_code", "md_in_html", "tables"]
    html = markdown.markdown(text, extensions=extensions)
    return re.findall(r"<pre><code>(.*?)</code></pre>", html, re.DOTALL)


def blocks(page: str, language: str = "python") -> list[str]:
    """Returns the code blocks of a page in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.M | re.S)
