"""Going on without lost ranks: what a break of the group has undone is made again.

Under EPD_POLICY_DEGRADE_LATE a rank is lost that ends, or that an operation has waited for until its deadline. Then
the operations in flight fail on all others, which resume and repeat: a rank also what it has completed and another
one has not. One operation of a group is in flight at a time, so that is the last one at most. A rank whose caller is
elsewhere, as in a collective, does so by a thread (watch.py).
"""

from __future__ import annotations

import contextlib
import enum
import threading
from typing import TYPE_CHECKING, Any, Iterator, Optional, Protocol, Union

import torch

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

    stream: Any  # None on host devices

    def submit(self, joined: Joined, attempt: Attempt) -> epd.Ticket: ...

    def completed(self) -> None:
        """The caller has the results. Only a REPEAT may follow."""

    def repeated(self, joined: Joined) -> None:
        """The REPEAT has ended well."""


class Steps:
    """The operations of one group. The CPU waits for each.

    out   this rank is lost itself
    lock  of all of this. Whoever calls `end` holds it until he has taken what the operation delivers
    """

    def __init__(self) -> None:
        self.out = False
        self.lock = threading.RLock()
        self._unended: Optional[Step] = None  # whose end was not waited for, or not until it came
        self._ticket: Optional[epd.Ticket] = None  # its; None: it has failed and is to be submitted again
        # Of the one whose end was not waited for, if `look` has taken it.
        self._outcome: Union[None, epd.Result, epd.Error] = None
        self._last: Optional[Step] = None  # that has completed
        self._last_index = -1
        self._taken: Any = None  # GPUs: the event behind the copies of the last one's results
        self.apart: Any = None  # GPUs: the stream in which `look` has submitted the operation again

    def begin(self, joined: Joined, step: Step) -> epd.Ticket:
        joined.settle()
        with self.lock:
            if self._unended is not None:  # its wait was interrupted; others may have to repeat it
                self.end(joined, self._unended)
            ticket = self._submit(joined, step, Attempt.FIRST)
            self._unended, self._ticket = step, ticket
            joined.used_slot()
            return ticket

    def end(self, joined: Joined, step: Step) -> None:
        """Returns when the operation that was begun last has ended well. Raises RankLost if this rank is lost."""
        assert step is self._unended
        with self.lock:
            try:
                result = self._ended(joined, step)
            except epd.Error:
                self._unended = self._outcome = self.apart = None
                raise
            if self.apart is not None:  # which the caller's stream does not wait for
                self.apart.synchronize()
            step.completed()
            self._unended = self._outcome = self.apart = None
            self._last, self._last_index = step, result.op_index

    def taken(self, stream: Any) -> None:
        """The caller has enqueued in this stream what takes the results of the operation that ended last."""
        if stream is not None:
            self._taken = torch.cuda.Event() if self._taken is None else self._taken
            self._taken.record(stream)

    def _ended(self, joined: Joined, step: Step) -> epd.Result:
        while self._outcome is None:
            if self._ticket is None:
                self._ticket = self._submit(joined, step, Attempt.AGAIN)
            try:
                return _wait(self._ticket)
            except BREAKS:
                self._ticket = None
                self._recover(joined)
        if isinstance(self._outcome, epd.Error):
            raise self._outcome
        return self._outcome

    def check(self, joined: Joined, stream: Any) -> None:
        """Takes notice of a break. What is made again is submitted in `stream`, which is current (None on host
        devices). Raises RankLost if this rank is lost."""
        with self.lock:
            try:
                joined.group.check()
            except BREAKS:
                self._make_up_for(joined, stream)

    def look(self, joined: Joined, stream: Any) -> None:
        """From time to time, by another thread than the caller's: makes operations again if there was a break and the
        caller is elsewhere. Submits in `stream`, which is current (None on host devices). What fails is told to the
        caller's next call."""
        if self.out or not self.lock.acquire(blocking=False):
            return
        try:
            joined.group.check()
        except BREAKS:
            with contextlib.suppress(epd.Error):
                self._make_up_for(joined, stream)
        except epd.Error:
            pass
        finally:
            self.lock.release()

    def _make_up_for(self, joined: Joined, stream: Any) -> None:
        step, ticket = self._unended, self._ticket
        if step is not None and ticket is not None and self._outcome is None:
            if ticket.pending:
                return  # the break has not reached it yet
            try:
                self._outcome = ticket.wait(epd.NO_WAIT)
            except BREAKS:
                self._ticket = None
            except epd.Error as error:  # its own, for the caller
                self._outcome = error
        if stream is not None and self._taken is not None:
            stream.wait_event(self._taken)
        with _moved([step, self._last], stream):
            resume_op = self._recover(joined)
            outcome = self._outcome
            if step is not None and (outcome is None or _is_due(outcome, resume_op)):
                self._outcome, self._ticket, self.apart = None, None, stream
                self._ticket = self._submit(joined, step, Attempt.AGAIN)
        if stream is not None:
            stream.synchronize()

    def _submit(self, joined: Joined, step: Step, attempt: Attempt) -> epd.Ticket:
        while True:
            try:
                return joined.submit_now(step.submit, joined, attempt)
            except BREAKS:
                self._recover(joined)

    def _recover(self, joined: Joined) -> int:
        """Afterwards the group's next operation is the one that this rank has not completed. Returns the first one
        that was to be made again."""
        while True:
            try:
                resume_op = joined.group.resume().resume_op
            except epd.RankLost:
                self.out = True
                raise
            last = self._last
            if last is None or self._last_index < resume_op:
                return resume_op
            try:
                _wait(joined.submit_now(last.submit, joined, Attempt.REPEAT))
            except BREAKS:
                continue
            last.repeated(joined)
            return resume_op


def _is_due(outcome: Union[epd.Result, epd.Error], resume_op: int) -> bool:
    """It went well here, and not on another rank."""
    return isinstance(outcome, epd.Result) and outcome.op_index >= resume_op


@contextlib.contextmanager
def _moved(steps: list[Optional[Step]], stream: Any) -> Iterator[None]:
    """Inside, they are submitted in that stream."""
    moved = [(step, step.stream) for step in steps if step is not None]
    for step, _ in moved:
        step.stream = stream
    try:
        yield
    finally:
        for step, before in moved:
            step.stream = before


def _wait(ticket: epd.Ticket) -> epd.Result:
    while True:
        try:
            return ticket.wait()
        except epd.DeadlineExceeded:
            if not ticket.pending:
                raise
