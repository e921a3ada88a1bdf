"""Documents with some of their values, keys and items changed, for readers of JSON that may hold anything."""

from __future__ import annotations

import copy
import random
from typing import Any

WRONG = (
    None, True, 0, -1, 2**70, 1.5, "", "x", "a/b", "\n", "${X}", "${CSRC}/x", "..", "\x00", "\ud800", [], ["x"], [[]],
    [["a", "b", "c"]], [1, 2], [None], {}, {"a": 1}, {"a": {"b": []}},
)  # fmt: skip


def mutant(choose: random.Random, document: Any) -> Any:
    """Return a copy of a document with one to three values, keys or items changed."""
    changed = copy.deepcopy(document)
    for _ in range(choose.choice((1, 1, 2, 3))):
        parent, key, node = None, None, changed
        while isinstance(node, (dict, list)) and node and (parent is None or choose.random() < 0.8):
            parent, key = node, choose.choice(list(node) if isinstance(node, dict) else range(len(node)))
            node = node[key]
        if parent is None:
            changed = copy.deepcopy(choose.choice(WRONG))
        elif choose.random() < 0.8:
            parent[key] = copy.deepcopy(choose.choice(WRONG))
        else:
            parent.pop(key)
    return changed
