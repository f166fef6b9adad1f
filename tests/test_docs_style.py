"""Laws of the documentation: short sentences, table lines that fit a screen, links that lead on.

The logs in `docs/experiments/` keep their sentences and tables; only their links are followed.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
MOST_WORDS = 30
MOST_CHARACTERS = 200
PAGES = [*sorted(DOCS.glob("*.md")), *sorted((DOCS / "tutorials").glob("*.md"))]
ALL_PAGES = sorted(DOCS.rglob("*.md"))


def without_fences(text: str) -> str:
    """The page without ``` blocks."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def paragraphs(text: str) -> Iterator[str]:
    """Prose alone, a list item counting as a paragraph; no code, tables, headings or images."""
    lines: list[str] = []
    for line in [*without_fences(text).splitlines(), ""]:
        bare = line.strip()
        item = re.match(r"(?:[-*>]|\d+\.) +", bare)
        skipped = re.match(r"(?: {4}|\t| *[|#]| *!\[| *\[[^\]]+\]: )", line)
        if lines and (not bare or item or skipped):
            yield " ".join(lines)
            lines = []
        if bare and not skipped:
            lines.append(bare[item.end() :] if item else bare)


def sentences(paragraph: str) -> list[str]:
    """Inline code counts as one word, and a full stop inside it ends nothing."""
    plain = re.sub(r"`[^`]*`", "code", paragraph)
    plain = re.sub(r"\]\([^)]*\)", "]", plain)
    return re.split(r"(?<=[.!?])[)*_\"]*\s+", plain)


def long_sentences(text: str) -> list[str]:
    found = [sentence for part in paragraphs(text) for sentence in sentences(part)]
    return [one for one in found if len(re.findall(r"\S*\w\S*", one)) > MOST_WORDS]


def wide_table_lines(text: str) -> list[str]:
    lines = without_fences(text).splitlines()
    return [line for line in lines if line.strip()[:1] == "|" and len(line) > MOST_CHARACTERS]


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", without_fences(page.read_text(encoding="utf-8")))
    inline = re.findall(r"\]\(([^)\s]+)[^)]*\)", text)
    defined = re.findall(r"^\[[^\]]+\]: +(\S+)", text, flags=re.MULTILINE)
    targets = [link.split("#")[0] for link in inline + defined if "://" not in link]
    return [target for target in targets if target and not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_has_more_than_thirty_words(page: Path) -> None:
    assert long_sentences(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_line_has_more_than_200_characters(page: Path) -> None:
    assert wide_table_lines(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    assert broken_links(page) == []


def test_a_long_sentence_is_found_in_prose_and_in_lists_and_not_in_code() -> None:
    words = " ".join(["word"] * 31)
    assert long_sentences(f"Short. {words}.\n") == [f"{words}."]
    assert long_sentences(f"A list:\n\n- {words}\n  and more\n- short\n") == [f"{words} and more"]
    assert long_sentences(f"```\n{words}\n```\n\n    {words}\n\n| {words} |\n\n# {words}\n") == []
    assert long_sentences(f"{words[:-10]} `rookworld train --out a.`\n") == []
    assert long_sentences(f"{words[:-10]}. Another begins.\n") == []


def test_a_wide_table_line_is_found() -> None:
    wide = f"| {'x' * 200} |"
    assert wide_table_lines(f"| narrow |\n{wide}\n{'prose ' * 50}\n```\n{wide}\n```\n") == [wide]


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md#part) [b](gone.md) [c](https://example.org) [d](#here) `[e](f)` [g][g]\n\n"
        "[g]: lost/g.md\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["gone.md", "lost/g.md"]
