"""Host memory for preempted sequences, so that they go on later with the same bits.

A swapped sequence keeps its slot, so its per-slot tensors stay on the device. Its pages go to host
memory, and their device pages serve others. On a GPU, computing the pages again would be slower.
Their last bits could differ, too, since prefill and decode steps have different kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpmcu.engine.prefix.host import HostTier

if TYPE_CHECKING:
    from cpmcu import C


@dataclasses.dataclass(slots=True)
class Swapped:
    """The pages of a sequence in host memory."""

    num_pages: int  # pages of the group of layers without a window
    # For each group of layers: the number of its first page within the sequence, and the blocks.
    groups: list[tuple[int, list[int]]]


class SwapSpace:
    """Pages of swapped sequences. Used by the engine thread only."""

    def __init__(self, engine: C.Engine, hosts: Sequence[HostTier]) -> None:
        """Each group has one of `hosts` for its pages. If all limits are 0, nothing is swapped."""
        self._engine = engine
        self._hosts = hosts

    def save(self, slot: int) -> Swapped | None:
        """Moves the pages of a slot, which no step in flight uses, to host memory.

        Returns their blocks. None: they do not fit, and nothing has changed.
        """
        engine = self._engine.pages
        if all(host.limit == 0 for host in self._hosts):
            return None
        swapped = Swapped(len(engine.of_slot(slot)), [])
        for group, host in enumerate(self._hosts):
            blocks: list[int] = []
            swapped.groups.append((engine.first_of_slot(slot, group), blocks))
            if engine.group_page_bytes(group) == 0:  # no layer is in this group
                continue
            wanted = len(engine.of_slot(slot, group))
            fits = wanted <= host.limit - host.num_used
            while fits and len(blocks) < wanted:
                block = host.take()
                fits = block >= 0  # the system may give less memory than the limit
                blocks += [block] if fits else []
            if not fits:
                self.forget(swapped)
                return None
        for group, (_, blocks) in enumerate(swapped.groups):
            if blocks:
                engine.save(engine.of_slot(slot, group), self._hosts[group].blocks, blocks, group)
        self._engine.vacate(slot)
        return swapped

    def load(self, slot: int, swapped: Swapped) -> None:
        """Copies the pages of `swapped` to the slot, which has the pages that it reads."""
        for group, (first, blocks) in enumerate(swapped.groups):
            skipped = self._engine.pages.first_of_slot(slot, group) - first  # before the window
            read = blocks[skipped:]
            if read:
                pages = self._engine.pages.of_slot(slot, group)[: len(read)]
                self._engine.pages.load(pages, self._hosts[group].blocks, read, group)
        self.forget(swapped)

    def forget(self, swapped: Swapped) -> None:
        """Frees the blocks."""
        for host, (_, blocks) in zip(self._hosts, swapped.groups):
            for block in blocks:
                host.give(block)
