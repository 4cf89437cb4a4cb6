"""Token trees as objects: the reference of csrc/kernels/tree/tree.h, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# ---- growth


@dataclass(eq=False)
class Candidate:
    """A continuation of `parent`, or of the root."""

    index: int
    token: int
    score: np.float32  # cumulative log-probability
    parent: Candidate | None
    row: int = -1  # its index in its level's draft step, if selected

    @property
    def ancestors(self) -> list[Candidate]:
        return [] if self.parent is None else [*self.parent.ancestors, self.parent]

    @property
    def depth(self) -> int:
        return 1 + len(self.ancestors)


def best(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (-c.score, c.index))[:count]


@dataclass
class Growth:
    """All candidates, and the selected ones of each level."""

    topk: int
    candidates: list[Candidate] = field(default_factory=list)
    levels: list[list[Candidate]] = field(default_factory=list)

    def expand(self, tokens: Ints, logprobs: npt.NDArray[np.float32]) -> None:
        """tokens, logprobs: [rows of the previous level (level 0: one), k]."""
        parents = self.levels[-1] if self.levels else [None]
        new = []
        for parent, row_tokens, row_logprobs in zip(parents, tokens, logprobs):
            before = np.float32(0) if parent is None else parent.score
            for token, logprob in zip(row_tokens, row_logprobs):
                index = len(self.candidates) + len(new)
                new.append(Candidate(index, int(token), np.float32(before + logprob), parent))
        self.candidates += new
        self.levels.append(best(new, self.topk) if self.levels else list(new))
        for row, candidate in enumerate(self.levels[-1]):
            candidate.row = row

    def ancestor_mask(self, candidate: Candidate) -> int:
        """The mask bits of the candidate and its ancestors; a mask has 64 bits."""
        chain = [*candidate.ancestors, candidate]
        bits = sum(1 << (level * self.topk + c.row) for level, c in enumerate(chain))
        return bits & (2**64 - 1)


@dataclass
class Tree:
    """The tree as arrays; node 0 is the root."""

    tokens: list[int]
    parents: list[int]

    @property
    def depths(self) -> list[int]:
        return [len(self.path_to(node)) - 1 for node in range(len(self.tokens))]

    @property
    def masks(self) -> list[int]:
        return [sum(1 << n for n in self.path_to(node)) for node in range(len(self.tokens))]

    def path_to(self, node: int) -> list[int]:
        return [0] if node == 0 else [*self.path_to(self.parents[node]), node]


def build(growth: Growth, root: int, num_nodes: int) -> Tree:
    chosen = best(growth.candidates, num_nodes - 1)
    node_of: dict[Candidate | None, int] = {c: i for i, c in enumerate(chosen, start=1)}
    node_of[None] = 0
    return Tree([root, *(c.token for c in chosen)], [-1, *(node_of[c.parent] for c in chosen)])


def chain(root: int, tokens: Sequence[int]) -> Tree:
    """A negative token and all tokens after it are unused."""
    end = next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
    unused = len(tokens) - end
    return Tree(
        [root, *tokens[:end], *[-1] * unused], [-1, *range(end), *[0] * unused]
    )  # fmt: skip


def random_tree(rng: np.random.Generator, num_nodes: int, max_depth: int, vocab: int) -> Tree:
    """Siblings hold different tokens; parents precede children."""
    tree = Tree([int(rng.integers(vocab))], [-1])
    depths = [0]
    while len(tree.tokens) < num_nodes:
        open_nodes = [n for n, depth in enumerate(depths) if depth < max_depth]
        parent = open_nodes[-1] if rng.random() < 0.4 else int(rng.choice(open_nodes))
        taken = {t for t, p in zip(tree.tokens, tree.parents) if p == parent}
        free = [t for t in range(vocab) if t not in taken]
        tree.tokens.append(int(rng.choice(free)) if free else -1)
        tree.parents.append(parent if free else 0)
        depths.append(depths[tree.parents[-1]] + 1)
    return tree


# ---- acceptance


@dataclass
class Acceptance:
    path: list[int]
    emitted: list[int]
    finished: bool


@dataclass
class Candidates:
    """The most likely tokens of a node; the first `num` pass the filters."""

    ids: list[int]
    num: int


@dataclass
class TopP:
    """Top-p verification: the candidates of each node, and verify_window."""

    candidates: list[Candidates]
    window: int


def accept(
    tree: Tree,
    drawn: Sequence[int],
    stop_ids: Sequence[int],
    max_tokens: int,
    node: int = 0,
    topp: TopP | None = None,
) -> Acceptance:
    """Starts at `node`."""
    kids = children(tree, node)
    token = drawn[node]
    if topp is not None and token >= 0:
        token = accepted_token(tree, node, token, topp)
    if token in stop_ids or token < 0 or max_tokens <= 1:  # -1: no token
        return Acceptance([node], [token], True)
    if token not in kids:
        return Acceptance([node], [token], False)
    rest = accept(tree, drawn, stop_ids, max_tokens - 1, kids[token], topp)
    return Acceptance([node, *rest.path], [token, *rest.emitted], rest.finished)


def children(tree: Tree, node: int) -> dict[int, int]:
    """Returns the children of a node by their tokens."""
    pairs = zip(tree.tokens, tree.parents)
    return {t: child for child, (t, parent) in enumerate(pairs) if parent == node and t >= 0}


def accepted_token(tree: Tree, node: int, drawn: int, topp: TopP) -> int:
    """The token that top-p verification emits at the node."""
    kids, own = children(tree, node), topp.candidates[node]
    for token in (drawn, *own.ids[: own.num]):
        if token in kids:
            return token
    second = own.ids[1]
    at = kids.get(second)
    for _ in range(topp.window):
        if at is not None:
            at = children(tree, at).get(topp.candidates[at].ids[0])
    return drawn if at is None else second


def fastdeploy_topp(drafts: Sequence[int], candidates: Sequence[Candidates], window: int) -> int:
    """The number of drafted tokens of a chain that FastDeploy's verify_draft_tokens accepts."""
    i = 0
    while i < len(drafts):
        ids, num = candidates[i].ids, candidates[i].num
        if drafts[i] in ids[:num]:
            i += 1
            continue
        if drafts[i] != ids[1]:
            break
        end, matches = i + 1, 0
        while matches < window and end < len(drafts) and candidates[end].ids[0] == drafts[end]:
            end, matches = end + 1, matches + 1
        if matches < window:
            break
        i = end
    return i


def compact(entries: npt.NDArray[Any], length: int, path: Sequence[int]) -> npt.NDArray[Any]:
    """Moves the KV entries of the accepted nodes; `length` tokens were cached before the step."""
    kept = entries[[length + node for node in path]]
    moved = entries.copy()
    moved[length : length + len(path)] = kept
    return moved


# ---- n-grams


def lookup(text: Sequence[int], min_ngram: int, max_ngram: int, count: int) -> list[int]:
    """The `count` tokens after the latest earlier occurrence of the end of the text."""
    text = list(text)
    for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        pattern = text[-n:]
        for begin in range(len(text) - n - 1, -1, -1):
            if text[begin : begin + n] == pattern:
                longer = list(text)
                for i in range(count):
                    longer.append(longer[begin + n + i])
                return longer[len(text) :]
    return [-1] * count
