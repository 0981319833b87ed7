"""The prose stays plain: few indefinite words, one word for one thing, known terms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs import language
from tests.docs.language import Text
from tests.docs.pages import DOCS, ROOT

CODE = tuple(language.python_files())
PAGES = tuple(language.page_files())
DECISIONS = tuple(sorted((DOCS / "decisions").glob("*.md")))

# Terms that users of training frameworks search for.
TERMS = """\
asynchronous save, AWS, Azure, BackupAndRestore, batch size, checkpoint, corrupt,
custom training loop, deterministic, disk full, distributed training,
EarlyStopping, elastic, environment variable, exit code, fault tolerance, Google Cloud,
goodput, grace period, GPU, hang, heartbeat, Kubernetes, learning rate, limitations,
metrics, mixed precision, ModelCheckpoint, monitoring, MultiWorkerMirroredStrategy,
NFS, out of memory, permissions, preemption, random seed, reproducible, restart,
resume, S3, shuffle, SIGTERM, Slurm, spot instance, TensorBoard, tf.data, timeout, TPU,
troubleshooting, worker failure"""


@functools.cache
def texts(
    of: Callable[[str, str], Iterator[Text]], files: tuple[Path, ...]
) -> tuple[Text, ...]:
    return tuple(
        text
        for path in files
        for text in of(path.read_text("utf-8"), f"{path.relative_to(ROOT)}")
    )


def test_docstrings_are_plain() -> None:
    found = language.measure(texts(language.docstrings, CODE))
    assert found.indefinite <= 5.0
    assert found.free <= 1.5
    assert found.pronouns <= 1.0
    assert found.bare == 0


def test_comments_are_plain() -> None:
    found = language.measure(texts(language.comments, CODE))
    assert found.indefinite <= 6.0


@pytest.mark.parametrize("folder", ["benchmarks", "campaigns", "tests"])
def test_the_harness_and_the_tests_are_plain(folder: str) -> None:
    """A summary of a test may be the reason of its result: "As in a notebook."."""
    files = tuple(sorted((ROOT / folder).rglob("*.py")))
    found = language.measure(texts(language.docstrings, files))
    assert found.indefinite <= 8.0
    assert found.free <= 0.5
    assert found.pronouns <= 5.0
    assert found.bare == 0


def test_messages_are_plain() -> None:
    """Errors, warnings and log lines, which users read without the code."""
    found = texts(language.messages, CODE)
    assert language.unwanted(found) == []
    assert language.measure(found).indefinite <= 5.5
    assert language.measure(found).free == 0


def test_guides_are_plain() -> None:
    found = language.measure(texts(language.paragraphs, PAGES))
    assert found.indefinite <= 5.0
    assert found.free <= 2.0


def test_decisions_are_plain() -> None:
    assert language.measure(texts(language.paragraphs, DECISIONS)).indefinite <= 6.0


@pytest.mark.parametrize("of", [language.docstrings, language.comments])
def test_the_code_uses_one_word_for_one_thing(
    of: Callable[[str, str], Iterator[Text]],
) -> None:
    assert language.unwanted(texts(of, CODE)) == []


def test_the_pages_use_one_word_for_one_thing() -> None:
    for pages in (PAGES, DECISIONS):
        assert language.unwanted(texts(language.paragraphs, pages)) == []


@pytest.mark.parametrize("term", TERMS.replace("\n", " ").split(", "))
def test_a_page_is_found_by(term: str) -> None:
    assert language.found_on(term, PAGES[1:])


# --- the checks can fail -------------------------------------------------------------

BAD = '''\
def wait(clock):
    """What is told of whoever goes on, and those that are not, in one place.

    Args:
        clock: measures.
    """
    return clock  # it is theirs, and nobody takes it along


LIMIT = 1.0
"""The patience with a dead member."""
'''


def test_a_bad_docstring_is_measured() -> None:
    found = language.measure(language.docstrings(BAD, "bad.py"))
    assert found.indefinite > 20
    assert found.free > 100
    assert found.pronouns == 100
    assert found.bare == 1


def test_bad_comments_and_paragraphs_are_measured() -> None:
    assert language.measure(language.comments(BAD, "bad.py")).indefinite > 10
    text = (
        "Those that say what it is, and who.\n\n```python\nfor each in all: ...\n```\n"
    )
    found = list(language.paragraphs(text, "bad.md"))
    assert [each.text for each in found] == ["Those that say what it is, and who."]
    assert language.measure(found).free > 200


def test_messages_are_the_strings_that_are_no_docstrings() -> None:
    source = '''\
"""A docstring."""
log.info("the run of %s goes on, %.1f s", name, seconds, extra="one-word")
raise ValueError(f"{path!r} is damaged "
                 f"in {place}")
'''
    found = list(language.messages(source, "bad.py"))
    assert [(each.where, each.text) for each in found] == [
        ("bad.py:2", "the run of ... goes on, ... s"),
        ("bad.py:3", "... is damaged in ..."),
    ]
    assert [line.split("'")[1] for line in language.unwanted(found)] == [
        *("goes on", "damaged"),
    ]


def test_unwanted_words_are_listed_with_their_replacement() -> None:
    texts = [*language.docstrings(BAD, "bad.py"), *language.comments(BAD, "bad.py")]
    words = [line.partition(": ")[2].split("'")[1] for line in language.unwanted(texts)]
    assert sorted(words) == [
        *("dead", "goes on", "member", "nobody", "patience", "told of", "whoever"),
    ]
    assert language.unwanted([Text("a.md", "The upload takes place here.")]) == []
    assert language.unwanted([Text("a.md", "A place in the data.")]) == [
        "a.md: 'place' in 'A place in the data.': use "
        "position (in data), path, directory, object path"
    ]


def test_an_unknown_term_is_not_found() -> None:
    page = DOCS / "glossary.md"
    assert language.found_on("heartbeat", [page]) == ["docs/glossary.md"]
    assert language.found_on("heartbeet", [page]) == []
