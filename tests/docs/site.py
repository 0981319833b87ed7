"""What mkdocs.yml cannot say: patterns in the nav, files outside docs/, helps' tables.

A hook of MkDocs (`hooks:` there). The site gets a copy of the changelog, and of each
file of the package: a page may link to such a file, as GitHub shows it. mkdocs-click
makes a paragraph of the lines of a help below a `\\b`, whose line breaks should stay;
the hook makes a code block of these lines.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path, PurePosixPath
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tfpreempt.cli import main

ROOT = Path(__file__).parents[2]
_AS_IT_IS = re.compile(r"^\x08\n(.*?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
_TO_SOURCE = re.compile(r"\]\((?:\.\./)+(?=tfpreempt/)")


def on_config(config: MkDocsConfig) -> None:
    """Puts the pages that a pattern of the nav matches in its place."""
    config.nav = filled(config.nav, Path(config.docs_dir))
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        command.help = fenced(command.help)


def fenced(text: str) -> str:
    """A command's help whose tables are code blocks."""
    return _AS_IT_IS.sub(r"```text\n\1\n```", inspect.cleandoc(text))


def filled(nav: Any, docs: Path) -> Any:
    """The nav without patterns."""
    if isinstance(nav, dict):
        return {title: filled(part, docs) for title, part in nav.items()}
    if not isinstance(nav, list):
        return nav
    pages: list[Any] = []
    for part in nav:
        if isinstance(part, str) and "*" in part:
            pages += [f"{p.relative_to(docs)}" for p in sorted(docs.glob(part))]
        else:
            pages.append(filled(part, docs))
    return pages


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the changelog and the package's source."""
    changelog = str(ROOT / "CHANGELOG.md")
    files.append(File.generated(config, "changelog.md", abs_src_path=changelog))
    for path in sorted((ROOT / "tfpreempt").rglob("*.py")):
        place = f"source/{path.relative_to(ROOT)}"
        files.append(File.generated(config, place, abs_src_path=str(path)))


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Leads links to the package's source to the copies."""
    depth = len(PurePosixPath(page.file.src_uri).parts) - 1
    return _TO_SOURCE.sub(f"]({'../' * depth}source/", markdown)
