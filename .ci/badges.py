"""Draw docs/pictures/badges.svg: Python, torch, architectures and licence, as pyproject.toml and archs.py state them.

Run it as ``python .ci/badges.py``; with ``--check`` it only compares.
"""

from __future__ import annotations

import re
import sys

from typecheck import ROOT, SOURCE

sys.path.insert(0, str(SOURCE))
from hipforge.archs import ARCHS

PICTURE = ROOT / "docs/pictures/badges.svg"
HEIGHT, PADDING, GAP = 20, 6, 6  # px
LETTER = 6.6  # px: mean width of a letter at 11 px, which textLength then enforces


def facts() -> dict[str, str]:
    """Return what each badge says, by its label."""
    project = (ROOT / "pyproject.toml").read_text()

    def stated(pattern: str) -> str:
        found = re.search(pattern, project, re.MULTILINE)
        if found is None:
            raise SystemExit(f"pyproject.toml has no line that matches {pattern}")
        return found[1]

    return {
        "python": "≥ " + stated(r'^requires-python = ">=([\d.]+)"'),
        "torch": "≥ " + stated(r'"torch>=([\d.]+)'),
        "GPUs": ", ".join(f"{arch.product} ({name})" for name, arch in ARCHS.items()),
        "licence": stated(r'^license = "(.+)"'),
    }


def drawn() -> str:
    """Return the picture's text."""
    parts, x = [], 0.0
    for label, value in facts().items():
        for text, colour in ((label, "#555"), (value, "#1f6feb")):
            letters = round(len(text) * LETTER, 1)
            width = letters + 2 * PADDING
            parts.append(f'<rect x="{x:.1f}" width="{width:.1f}" height="{HEIGHT}" fill="{colour}"/>')
            parts.append(f'<text x="{x + PADDING:.1f}" y="14" textLength="{letters}">{text}</text>')
            x += width
        x += GAP
    said = "; ".join(f"{label} {value}" for label, value in facts().items())
    size = f'width="{x - GAP:.0f}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{said}">'
    group = '<g font-family="Verdana,sans-serif" font-size="11" fill="#fff">'
    return "\n".join([head, group, *parts, "</g></svg>", ""])


if __name__ == "__main__":
    if "--check" in sys.argv[1:] and PICTURE.read_text() != drawn():
        sys.exit(f"{PICTURE.relative_to(ROOT)} is not what .ci/badges.py draws: run it")
    PICTURE.write_text(drawn())
