"""Going on without lost ranks: what a break of the group has undone is made again.

Under EPD_POLICY_DEGRADE_LATE a rank is lost that ends, or that an operation has waited for until its deadline. Then
the operations in flight fail on all others, which resume and repeat: a rank also what it has completed and another
one has not. One operation of a group is in flight at a time, so that is the last one at most.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Optional, Protocol

import epd

if TYPE_CHECKING:
    from .groups import Joined

BREAKS = (epd.RankLost, epd.DeadlineExceeded, epd.EngineRestarted, epd.Aborted)


class Attempt(enum.Enum):
    FIRST = 0  # inputs are the caller's tensors
    AGAIN = 1  # it was submitted and failed: the slot has the inputs
    REPEAT = 2  # it went well here and the caller has the results, but another rank has not completed it


class Step(Protocol):
    """An operation that may be submitted several times."""

    stream: object  # None on host devices

    def submit(self, joined: Joined, attempt: Attempt) -> epd.Ticket: ...

    def completed(self) -> None:
        """The caller has the results. Only a REPEAT may follow."""

    def repeated(self, joined: Joined) -> None:
        """The REPEAT has ended well."""


class Steps:
    """The operations of one group. The CPU waits for each. out: this rank is lost itself."""

    def __init__(self) -> None:
        self.out = False
        self._unended: Optional[Step] = None  # whose end was not waited for, or not until it came
        self._ticket: Optional[epd.Ticket] = None  # its; None: it has failed and is to be submitted again
        self._last: Optional[Step] = None  # that has completed
        self._last_index = -1

    def begin(self, joined: Joined, step: Step) -> epd.Ticket:
        joined.settle()
        if self._unended is not None:  # its wait was interrupted; others may have to repeat it
            self.end(joined, self._unended)
        ticket = self._submit(joined, step, Attempt.FIRST)
        self._unended, self._ticket = step, ticket
        return ticket

    def end(self, joined: Joined, step: Step) -> None:
        """Returns when the operation that was begun last has ended well. Raises RankLost if this rank is lost."""
        assert step is self._unended
        try:
            result = self._ended(joined, step)
        except epd.Error:
            self._unended = None
            raise
        step.completed()
        self._unended = None
        self._last, self._last_index = step, result.op_index

    def _ended(self, joined: Joined, step: Step) -> epd.Result:
        while True:
            if self._ticket is None:
                self._ticket = self._submit(joined, step, Attempt.AGAIN)
            try:
                return _wait(self._ticket)
            except BREAKS:
                self._ticket = None
                self._recover(joined)

    def check(self, joined: Joined) -> None:
        """Takes notice of a break. Raises RankLost if this rank is lost."""
        try:
            joined.group.check()
        except BREAKS:
            self._recover(joined)

    def _submit(self, joined: Joined, step: Step, attempt: Attempt) -> epd.Ticket:
        while True:
            try:
                return joined.submit(step.submit, joined, attempt)
            except BREAKS:
                self._recover(joined)

    def _recover(self, joined: Joined) -> None:
        """Afterwards the group's next operation is the one that this rank has not completed."""
        while True:
            try:
                resume_op = joined.group.resume().resume_op
            except epd.RankLost:
                self.out = True
                raise
            last = self._last
            if last is None or self._last_index < resume_op:
                return
            try:
                _wait(joined.submit(last.submit, joined, Attempt.REPEAT))
            except BREAKS:
                continue
            last.repeated(joined)
            return


def _wait(ticket: epd.Ticket) -> epd.Result:
    while True:
        try:
            return ticket.wait()
        except epd.DeadlineExceeded:
            if not ticket.pending:
                raise
