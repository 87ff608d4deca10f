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
from typing import Any, Callable, Iterator, Optional, Protocol, Union

import torch

import epd

BREAKS = (epd.RankLost, epd.DeadlineExceeded, epd.EngineRestarted, epd.Aborted)


class Attempt(enum.Enum):
    FIRST = 0  # inputs are the caller's tensors
    AGAIN = 1  # it was submitted and failed: the slot has the inputs
    REPEAT = 2  # it went well here and the caller has the results, but another rank has not completed it


class Step(Protocol):
    """An operation that may be submitted several times."""

    stream: Any  # None on host devices

    def submit(self, attempt: Attempt) -> epd.Ticket: ...

    def submitted(self) -> None:
        """For the first time."""

    def completed(self) -> None:
        """The caller has the results. Only a REPEAT may follow."""

    def repeated(self) -> None:
        """The REPEAT has ended well."""


class Resumable(Protocol):
    """What Steps need of a group."""

    group: epd.Group

    def settle(self) -> None: ...

    def submit_now(self, submission: Callable[..., epd.Ticket], *arguments: Any) -> epd.Ticket: ...

    def restored(self) -> None: ...


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
        self._outcome: Union[None, epd.Result, epd.Error] = None  # its, once it is known
        self._last: Optional[Step] = None  # that has completed
        self._last_index = -1
        self._due = False  # the last one must be repeated
        self._repetition: Any = None  # its ticket; True: it has ended
        self._untaken = False  # the caller has not got all that the last one delivers
        self._taken: Any = None  # GPUs: the event behind the copies of its results
        self._captured = False

    def captured(self) -> None:
        """A graph has operations of this group. When it may resume, the caller alone knows: not amid a replay."""
        with self.lock:
            self._captured, self._untaken = True, False

    def begin(self, joined: Resumable, step: Step) -> epd.Ticket:
        joined.settle()
        with self.lock:
            if self._unended is not None:  # its wait was interrupted; others may have to repeat it
                self.end(joined, self._unended)
            self._untaken = False
            ticket = self._submit(joined, step, Attempt.FIRST)
            self._unended, self._ticket = step, ticket
            step.submitted()
            return ticket

    def end(self, joined: Resumable, step: Step) -> None:
        """Returns when the operation that was begun last has ended well. Raises RankLost if this rank is lost. If it
        was interrupted, the next call goes on."""
        with self.lock:
            if step is not self._last:
                assert step is self._unended
                try:
                    result = self._ended(joined, step)
                except epd.Error:
                    self._unended = self._outcome = None
                    raise
                self._last, self._last_index, self._untaken = step, result.op_index, True
            step.completed()
            self._unended = self._outcome = None

    def taken(self, stream: Any) -> None:
        """The caller has enqueued in this stream what takes the results of the operation that ended last."""
        if stream is not None:
            self._taken = torch.cuda.Event() if self._taken is None else self._taken
            self._taken.record(stream)
        self._untaken = False

    def check(self, joined: Resumable, stream: Any) -> None:
        """Takes notice of a break, unless an operation is under way that will. What is made again is submitted in
        `stream`, which is current (None on host devices). Raises RankLost if this rank is lost."""
        with self.lock:
            try:
                joined.group.check()
            except BREAKS:
                self._make_up_for(joined, stream)

    def restore(self, joined: Resumable) -> None:
        """Takes back the ranks that are lost because they were late, if this is one of them too. They and all ranks that
        take part call it. The slots start over. Raises DeadlineExceeded: it names the ranks that have not called."""
        with self.lock:
            while True:
                lost = self.out
                try:
                    if not lost and self._unended is not None:
                        self.end(joined, self._unended)
                    joined.group.restore()
                    break
                except BREAKS:
                    if lost or _is_well(joined):
                        raise
                    with contextlib.suppress(epd.RankLost):  # this rank is, as the next turn tells
                        self._recover(joined)
            self._unended = self._ticket = self._outcome = self._last = self._repetition = None
            self._last_index, self._due, self._untaken, self.out = -1, False, False, False
            joined.restored()

    def look(self, joined: Resumable, stream: Any) -> None:
        """From time to time, by another thread than the caller's: as `check`, if the caller is elsewhere. What fails is
        told to the caller's next call."""
        if self.out or not self.lock.acquire(blocking=False):
            return
        try:
            if self._captured or not self._may_repeat(stream):
                return
            self.check(joined, stream)
            if self._due:  # it has failed before
                with self._in_stream(stream):
                    self._repeat(joined)
        except epd.Error:
            pass
        finally:
            self.lock.release()

    # ---- inside ------------------------------------------------------------------------------------

    def _ended(self, joined: Resumable, step: Step) -> epd.Result:
        while self._outcome is None:
            if self._ticket is None:
                self._ticket = self._submit(joined, step, Attempt.AGAIN)
            try:
                self._outcome = _wait(self._ticket)
            except BREAKS:
                self._ticket = None
                self._recover(joined)
        if isinstance(self._outcome, epd.Error):
            raise self._outcome
        return self._outcome

    def _may_repeat(self, stream: Any) -> bool:
        """Not while the caller is about to take results, and on GPUs not before he has waited for the end: there his
        stream copies inputs and outputs."""
        return not self._untaken and (self._unended is None or stream is None)

    def _make_up_for(self, joined: Resumable, stream: Any) -> None:
        """If it may. Else the caller's next call does."""
        if not self._may_repeat(stream):
            return
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
        with self._in_stream(stream):
            resume_op = self._recover(joined)
            outcome = self._outcome
            if step is not None and (outcome is None or _is_due(outcome, resume_op)):
                self._outcome = self._ticket = None
                self._ticket = self._submit(joined, step, Attempt.AGAIN)

    @contextlib.contextmanager
    def _in_stream(self, stream: Any) -> Iterator[None]:
        """Inside, the last operation is repeated in that stream; it is not the caller's."""
        last = self._last
        if stream is None or last is None:
            yield
            return
        if self._taken is not None:
            stream.wait_event(self._taken)
        before, last.stream = last.stream, stream
        try:
            yield
        finally:
            last.stream = before
            stream.synchronize()

    def _submit(self, joined: Resumable, step: Step, attempt: Attempt) -> epd.Ticket:
        while True:
            try:
                self._repeat(joined)
                return joined.submit_now(step.submit, attempt)
            except BREAKS:
                self._recover(joined)

    def _recover(self, joined: Resumable) -> int:
        """Afterwards the group's next operation is the one that this rank has not completed. Returns the first one
        that was to be made again."""
        while True:
            try:
                resume_op = joined.group.resume().resume_op
            except epd.RankLost:
                self.out = True
                raise
            self._due, self._repetition = self._last is not None and self._last_index >= resume_op, None
            try:
                self._repeat(joined)
            except BREAKS:
                continue
            return resume_op

    def _repeat(self, joined: Resumable) -> None:
        """The last operation, if that is due. If it fails or is interrupted, it stays due."""
        if not self._due:
            return
        last = self._last
        assert last is not None
        try:
            if self._repetition is None:
                self._repetition = joined.submit_now(last.submit, Attempt.REPEAT)
            if self._repetition is not True:
                _wait(self._repetition)
                self._repetition = True
        except epd.Error:
            self._repetition = None
            raise
        last.repeated()
        self._due, self._repetition = False, None


def _is_due(outcome: Union[epd.Result, epd.Error], resume_op: int) -> bool:
    """It went well here, and not on another rank."""
    return isinstance(outcome, epd.Result) and outcome.op_index >= resume_op


def _is_well(joined: Resumable) -> bool:
    try:
        joined.group.check()
    except BREAKS:
        return False
    return True


def _wait(ticket: epd.Ticket) -> epd.Result:
    while True:
        try:
            return ticket.wait()
        except epd.DeadlineExceeded:
            if not ticket.pending:
                raise
