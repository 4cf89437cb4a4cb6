"""A slow version of csrc/kernels/tree/mtp_rows.h: one sequence, one object for each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tests.reference.tree import Candidate

COMMON = -1  # the branch of a row that no drafted token reaches


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a module. A row without a token is padding."""

    branch: int
    position: int
    token: int | None


@dataclasses.dataclass
class MtpSequence:
    """A sequence of which `cached` is cached, and its draft or the next chunk of its prompt."""

    slot: int
    cached: Sequence[int]
    num_shared: int
    window: int
    levels: Sequence[Sequence[Candidate]]  # levels of the draft; () for a prompt
    following: Sequence[int]  # the next token, or the chunk

    @property
    def num_rows(self) -> int:
        return min(self.window, len(self.cached) - self.num_shared)

    def branches(self, module: int) -> Sequence[Candidate | None]:
        """The last token of each branch that the module reads; None: it reads no drafted one."""
        return self.levels[module - 1] if self.levels and module else [None]

    def text(self, branch: Candidate | None) -> list[int]:
        drafted = [] if branch is None else [c.token for c in (*branch.ancestors, branch)]
        return [*self.cached, *self.following, *drafted]

    def rows(self, module: int) -> list[Row]:
        """The rows of a module. The last `module` positions have a row for each branch."""
        length = len(self.cached)
        first, branched = length - self.num_rows, max(length - module, length - self.num_rows)

        def row(branch: int, last: Candidate | None, position: int) -> Row:
            text = self.text(last)
            at = position + module + 1
            return Row(branch, position, text[at] if at < len(text) else 0)

        branches = self.branches(module)
        found = [row(COMMON, branches[0], q) for q in range(first, branched)]
        for number, last in enumerate(branches):
            found += [row(number, last, q) for q in range(branched, length)]
        return found

    def visible(self, module: int, row: int) -> set[int]:
        """The rows that a row sees."""
        rows = self.rows(module)
        mine = rows[row].branch
        return {i for i in range(row + 1) if rows[i].branch in (COMMON, mine)}

    def row_before(self, module: int, row: int) -> int:
        """The row of module - 1 with the same position, on the branch that this one continues."""
        mine = self.rows(module)[row]
        branch = 0
        if mine.branch != COMMON and (last := self.branches(module)[mine.branch]) is not None:
            branch = last.parent.row if last.parent else 0
        (found,) = (
            i
            for i, before in enumerate(self.rows(module - 1))
            if before.position == mine.position and before.branch in (COMMON, branch)
        )
        return found
