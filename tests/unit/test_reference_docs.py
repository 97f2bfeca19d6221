"""The documentation says what the code says, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])


def test_generated_pages_are_up_to_date() -> None:
    script = ROOT / "scripts" / "generate_reference.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = [target for target in _links(page.read_text(encoding="utf-8")) if not _exists(page, target)]
    assert not broken


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Where the time went", "where-the-time-went"),
        ("`[[workers]]`", "workers"),
        ("Busy is not dead", "busy-is-not-dead"),
    ],
)
def test_anchors_are_made_as_github_makes_them(heading: str, anchor: str) -> None:
    assert _anchors(f"# {heading}\n") == {anchor}


def test_a_link_to_nothing_is_noticed() -> None:
    page = ROOT / "README.md"
    assert not _exists(page, "docs/no-such-page.md")
    assert not _exists(page, "docs/reference/api.md#no-such-heading")
    assert _exists(page, "docs/reference/api.md#errors")


def _links(text: str) -> list[str]:
    """Targets of inline links that are neither in code nor on the web."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`(?!\]\()", "", text)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", target)]


def _exists(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = page if not path else page.parent / path
    return file.exists() and (not anchor or anchor in _anchors(file.read_text(encoding="utf-8")))


def _anchors(text: str) -> set[str]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
