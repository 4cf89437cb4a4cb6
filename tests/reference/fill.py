"""A slow version of csrc/kernels/tree/draft_fill.h: one sequence, plain lists."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tests.reference import tree

MAX_NGRAM = 32
PRIOR = 4.0
HALVED_FROM = 256.0
UNKNOWN = math.log(0.7)


@dataclasses.dataclass
class Rates:
    """Counts how often tokens behind a match of n tokens were right."""

    hits: list[float] = dataclasses.field(default_factory=lambda: [0.0] * (MAX_NGRAM + 1))
    trials: list[float] = dataclasses.field(default_factory=lambda: [0.0] * (MAX_NGRAM + 1))

    def of(self, n: int) -> float:
        n = min(n, MAX_NGRAM)
        return (self.hits[n] + PRIOR * n / (n + 1)) / (self.trials[n] + PRIOR)

    def count(self, path: Path, accepted: Sequence[int]) -> None:
        """`accepted`: the tokens of the step that `path` was made for."""
        for i, (token, right) in enumerate(zip(path.tokens, accepted)):
            if i >= path.first:
                n = min(path.match + i - path.first, MAX_NGRAM)
                self.trials[n] += 1
                self.hits[n] += token == right
            if token != right:
                break

    def age(self) -> None:
        for n, trials in enumerate(self.trials):
            if trials >= HALVED_FROM:
                self.hits[n] /= 2
                self.trials[n] /= 2


@dataclasses.dataclass
class Path:
    """The context's path, from the root on. It has no tokens if nothing matched."""

    first: int  # tokens that the draft gave
    match: int
    tokens: list[int]


@dataclasses.dataclass
class Node:
    token: int
    parent: int
    score: float


def match_length(text: Sequence[int], end: int, most: int) -> int:
    """The number of tokens before `end` that equal the last tokens of the text."""
    n = 0
    while n < min(end, most) and text[end - 1 - n] == text[len(text) - 1 - n]:
        n += 1
    return n


def nodes_of(draft: Sequence[tuple[int, int, float]]) -> list[Node]:
    """Root and draft (token, parent, score). Unused tokens get -1 and the score -inf."""
    nodes = [Node(0, -1, 0.0)]
    for token, parent, score in draft:
        unused = token < 0 or nodes[parent].token < 0
        nodes.append(Node(-1, 0, -math.inf) if unused else Node(token, parent, score))
    return nodes


def children(nodes: Sequence[Node], parent: int) -> list[int]:
    return [i for i, node in enumerate(nodes) if node.token >= 0 and node.parent == parent]


def fill(
    context: Sequence[int],
    draft: Sequence[tuple[int, int, float]],
    depth: int,
    count: int,
    shortest: int,
    longest: int,
    rates: Rates,
) -> tuple[list[tuple[int, int, float]], Path]:
    """The filled draft of `count` tokens (token, parent, score), and the context's path."""
    nodes = nodes_of(draft)
    main = [0]
    while found := children(nodes, main[-1]):
        main.append(found[0])
    best, text, end = (shortest - 1, 0), list(context), 0
    for j in range(min(len(main), depth)):
        longer = [*context, *(nodes[i].token for i in main[1 : j + 1])]
        for place in range(len(longer) - 1, 0, -1):
            n = match_length(longer, place, longest)
            if n > best[0]:
                best, text, end = (n, j), longer, place
    n, first = best
    path = Path(first, n, [])
    if end:
        following = tree.lookup(text, n, n, depth - first)
        path.tokens = [*text[len(context) :], *following]
        node = main[first]
        for i, token in enumerate(following):
            score = nodes[node].score + math.log(rates.of(n + i))
            same = [c for c in children(nodes, node) if nodes[c].token == token]
            if same:
                nodes[same[0]].score = max(nodes[same[0]].score, score)
            else:
                nodes.append(Node(token, node, score))
            node = same[0] if same else len(nodes) - 1
    used = [i for i in range(1, len(nodes)) if nodes[i].token >= 0]
    order = sorted(used, key=lambda i: (-nodes[i].score, i))[:count]
    number = {0: 0} | {i: at + 1 for at, i in enumerate(order)}
    filled = [(nodes[i].token, number[nodes[i].parent], nodes[i].score) for i in order]
    return filled + [(-1, 0, -math.inf)] * (count - len(filled)), path
