"""Lines of Python code without comments, docstrings and blanks: ``python .ci/code_lines.py REVISION PATH ...``.

It counts the files of a git revision below the paths, so the figure of an earlier state can be reproduced. With
``--since EARLIER`` it counts only files that both revisions have, in both of them.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count(text: str) -> int:
    """Return the lines of a source that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def counts(revision: str, paths: list[str]) -> dict[str, int]:
    """Return the lines of each Python file below the paths at a revision."""
    names = _git("ls-tree", "-r", "--name-only", revision, "--", *paths).split("\n")
    return {name: count(_git("show", f"{revision}:{name}")) for name in names if name.endswith(".py")}


def _git(*words: str) -> str:
    return subprocess.run(("git", *words), check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print the sum, or both sums and the change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--since", metavar="EARLIER")
    parser.add_argument("--files", action="store_true", help="also a line per file")
    given = parser.parse_args()
    now = counts(given.revision, given.paths)
    before = now if given.since is None else counts(given.since, given.paths)
    both = sorted(now.keys() & before.keys())
    if given.files:
        print("".join(f"{before[name]:6} {now[name]:6}  {name}\n" for name in both), end="")
    old, new = (sum(each[name] for name in both) for each in (before, now))
    print(new if given.since is None else f"{old} -> {new} ({new / old - 1:+.1%}) in {len(both)} files")


if __name__ == "__main__":
    main()
