"""Measures the language of the package and the documentation, and searches pages.

Docstrings and comments of TensorFlow, Keras and google-cloud-storage have 3.0 to 4.6
indefinite words per 100 words. A text with many of them makes the reader search for the
noun. `WORDS` has the words that the project does not use, and the word to use instead.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.docs.pages import DOCS, ROOT

GENERATED = {"follow-one-restart.md", "follow-one-sigterm.md"}  # parts of docstrings

INDEFINITE = re.compile(
    r"\b(?:it|its|they|them|their|one|ones|those|these|this|that|which|what|whatever|"
    r"who|whom|whose|whoever|others?|another|all|none|nobody|everybody|nothing|each)\b",
    re.IGNORECASE,
)
FREE = re.compile(r"\b(?:what|whatever|who|whoever)\b", re.IGNORECASE)
BEGINNING = re.compile(
    r"(?:It|Its|They|Those|These|One|What|Who|Whoever|That|Where|As|Of|None|Another|"
    r"So|All|Nothing|Nobody)\b"
)
BARE_ARGUMENT = re.compile(
    r"^\s+\*{0,2}\w+: (?:of|see|where|its|as|whose|likewise|has|is|measures)\b"
    r"[^\n]{0,30}$",
    re.MULTILINE,
)
_WORD = re.compile(r"[A-Za-z']+")
_FENCED = re.compile(r"```.*?```", re.DOTALL)
_SESSION = re.compile(r"^\s*(?:>>>|\.\.\.).*$", re.MULTILINE)
_LOGGED = re.compile(r"%[-.\d]*[a-z]")
_PRAGMA = re.compile(r"# (?:ruff|noqa|type|mypy|---)")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

WORDS = {
    r"go(?:es|ing)? on|went on": "continue; after a restart: resume",
    r"com(?:e|es|ing) back|came back": "return; after a restart: resume",
    r"anew|begins? again": "again; without a checkpoint: from scratch",
    r"nobody|everybody|whoever": "the noun: no process, every worker",
    r"as ever|be it|for want of|in earnest|in the midst of|it is said": "plain words",
    r"signs? of life": "heartbeat",
    r"torn|half-written": "incomplete",
    r"damaged": "corrupt",
    r"dead|dies|die|died": "crashed, terminated, unreachable",
    r"patience": "timeout, deadline, grace period",
    r"(?:tell|tells|told) of|hears?|heard": "report, receive",
    r"obeys?": "follow",
    r"of ours|of theirs": "of tfpreempt, of the workers",
    r"tak(?:e|es|ing) along": "include",
    r"way out": "exit",
    r"members?": "participant",
    r"places?": "position (in data), path, directory, object path",
}
ALLOWED = re.compile(
    r"\bin (?:its |one |the same )?place\b|\btakes? place\b"  # idioms
    r"|\bas members\b"  # of an enumeration
    r"|\bclocks place\b",  # the verb
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Text:
    """A docstring, a comment or a paragraph.

    Attributes:
        where: file, with the name or the line.
        text: the text, without code blocks.
        is_summarized: whether the first paragraph is a summary to be measured.
    """

    where: str
    text: str
    is_summarized: bool = False


@dataclasses.dataclass(frozen=True)
class Measure:
    """Figures of some texts.

    Attributes:
        indefinite: indefinite words per 100 words.
        free: "what" and "who" per 1,000 words.
        pronouns: percentage of summaries that begin with a pronoun.
        bare: number of Args entries without a noun.
    """

    indefinite: float
    free: float
    pronouns: float
    bare: int


def docstrings(source: str, where: str) -> Iterator[Text]:
    """Yields the docstrings of a Python source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            text = _SESSION.sub("", _FENCED.sub("", text))
            name = getattr(node, "name", "module")
            yield Text(f"{where}:{name}", text, not isinstance(node, ast.Module))


def comments(source: str, where: str) -> Iterator[Text]:
    """Yields the comments of a Python source, and the texts below constants."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not _PRAGMA.match(token.string):
            yield Text(f"{where}:{token.start[0]}", token.string.lstrip("# "))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for each in body[1:] if isinstance(body, list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                yield Text(f"{where}:{each.lineno}", str(each.value.value))


def messages(source: str, where: str) -> Iterator[Text]:
    """Yields the strings of a Python source that are sentences: errors, log lines.

    A value in an f-string, and the argument of a log line, is shown as "...".
    """
    tree = ast.parse(source)
    hidden = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.JoinedStr):
            parts = node.values
            hidden.update(parts)
        elif isinstance(node, ast.Constant) and node not in hidden:
            parts = [node]
        text = "".join(
            each.value
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
            else "..."
            for each in parts
        )
        if " " in text:
            yield Text(f"{where}:{node.lineno}", _LOGGED.sub("...", text))


def paragraphs(source: str, where: str) -> Iterator[Text]:
    """Yields the paragraphs of a Markdown source, without code and link targets."""
    for block in re.split(r"\n\s*\n", _FENCED.sub("", source)):
        if _WORD.search(block) and not block.lstrip().startswith(("<", "!")):
            yield Text(where, re.sub(r"\]\([^)]*\)|`[^`]*`", " ", block))


def measure(texts: Iterable[Text]) -> Measure:
    """Returns the figures of texts."""
    texts = list(texts)
    joined = " ".join(each.text for each in texts)
    words = max(1, len(_WORD.findall(joined)))
    begins = [bool(BEGINNING.match(t.text.strip())) for t in texts if t.is_summarized]
    return Measure(
        indefinite=100 * len(INDEFINITE.findall(joined)) / words,
        free=1000 * len(FREE.findall(joined)) / words,
        pronouns=100 * sum(begins) / max(1, len(begins)),
        bare=sum(len(BARE_ARGUMENT.findall(each.text)) for each in texts),
    )


def unwanted(texts: Iterable[Text]) -> list[str]:
    """Returns a line for each word of `WORDS` in texts, with the words to use."""
    found = []
    for each in texts:
        text = ALLOWED.sub("", " ".join(each.text.split()))
        for pattern, better in WORDS.items():
            found += [
                f"{each.where}: {match[0]!r} in {_context(text, match)!r}: use {better}"
                for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
            ]
    return found


def _context(text: str, match: re.Match[str]) -> str:
    return text[max(0, match.start() - 30) : match.end() + 30]


def python_files() -> list[Path]:
    """Returns the files of the package."""
    return sorted((ROOT / "tfpreempt").rglob("*.py"))


def page_files() -> list[Path]:
    """Returns README.md and the pages, without generated pages and decisions."""
    pages = (path for path in sorted(DOCS.rglob("*.md")) if path.name not in GENERATED)
    return [ROOT / "README.md", *(p for p in pages if "decisions" not in p.parts)]


def found_on(term: str, pages: Iterable[Path]) -> list[str]:
    """Returns the pages with a term in a heading or a text, in singular or plural.

    The site's search index has the same text. Links and markup are removed first.
    """
    words = r"[\s-]+".join(map(re.escape, term.split()))
    pattern = re.compile(rf"(?<![\w/]){words}(?:s|ed|ing)?\b", re.IGNORECASE)
    return [
        f"{path.relative_to(ROOT)}"
        for path in pages
        if pattern.search(re.sub(r"\]\([^)]*\)|[*_`]", "", path.read_text("utf-8")))
    ]
