"""Which of the two slots of a group a low-latency operation takes.

It depends on the dispatches that have no combine yet, not on how many operations there were. So a rank that replays a
graph and a rank that runs eagerly take the same slots.
"""

from __future__ import annotations


class Turn:
    """The turn of a dispatch and its combines."""

    __slots__ = ("_combine", "shared", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot  # of the dispatch
        self.shared = False  # another dispatch came before the combine
        self._combine = -1

    def combine_slot(self) -> int:
        """The slot of the next combine. It stays, as the caller may write rows to that slot before.

        Batches that take turns have a slot each. A dispatch that is alone uses both, so that it and its combine do not
        wait for each other.
        """
        if self._combine < 0:
            self._combine = self.slot if self.shared else self.slot ^ 1
        return self._combine

    def combined(self) -> None:
        self._combine = self.combine_slot() ^ 1


class Turns:
    """The turns of one group."""

    def __init__(self) -> None:
        self._open: list[Turn] = []  # that have no combine yet, the oldest first

    def next(self) -> Turn:
        """The turn of a dispatch: in a free slot, else in the slot of the oldest one."""
        taken = [turn.slot for turn in self._open]
        return Turn(0 if 0 not in taken else 1 if 1 not in taken else taken[0])

    def dispatched(self, turn: Turn) -> None:
        others = [other for other in self._open if other.slot != turn.slot]
        for other in others:
            other.shared = turn.shared = True
        self._open = [*others, turn]

    def combined(self, turn: Turn) -> None:
        turn.combined()
        if turn in self._open:
            self._open.remove(turn)
