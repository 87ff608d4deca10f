"""Going on without lost ranks: what a break of the group has undone is made again.

Under EPD_POLICY_DEGRADE_LATE a rank is lost that ends, or that an operation has waited for until its deadline. Then
the operations in flight fail on all others, and epd_group_advance says what they repeat: a rank also what it has
completed and another one has not. One operation of a group is in flight at a time, so that is the last one at most. A
rank whose caller is elsewhere, as in a collective, does so by a thread (watch.py).
"""

from __future__ import annotations

import contextlib
import enum
import threading
from typing import Any, Callable, Iterator, Optional, Protocol, Union

import torch

import epd


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
    """The part of a group that Steps need."""

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
        self._last: Optional[Step] = None  # that has completed
        self._last_index = -1
        self._due = False  # the last one must be repeated
        self._repeated = False  # it has been, and was not told yet
        self._unended: Optional[Step] = None  # whose end was not waited for, or not until it came
        self._attempt = Attempt.FIRST  # of its next submission
        self._outcome: Union[None, epd.Result, epd.Error] = None  # its, once it is known
        self._ticket: Optional[epd.Ticket] = None  # of the last one while that is due, else of the unended one
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
            self._unended, self._attempt = step, Attempt.FIRST
            try:
                self._go_on(joined, to_the_end=False)
            finally:
                if self._ticket is None or self._due:  # it has not begun
                    self._unended = None
            assert self._ticket is not None
            step.submitted()
            return self._ticket

    def end(self, joined: Resumable, step: Step) -> None:
        """Returns when the operation that was begun last has ended well. Raises RankLost if this rank is lost. If it
        was interrupted, the next call goes on."""
        with self.lock:
            if step is not self._last:
                assert step is self._unended
                try:
                    self._go_on(joined)
                    if isinstance(self._outcome, epd.Error):
                        raise self._outcome
                except epd.Error:
                    self._unended = self._outcome = None
                    raise
                assert self._outcome is not None
                self._last, self._last_index, self._untaken = step, self._outcome.op_index, True
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
            if not _is_well(joined):
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
                except epd.BREAKS:
                    if lost or _is_well(joined):
                        raise
                    with contextlib.suppress(epd.RankLost):  # this rank is, as the next turn tells
                        self._advance(joined)
                        self._go_on(joined)
            self._unended = self._ticket = self._outcome = self._last = None
            self._last_index, self._due, self._repeated, self._untaken, self.out = -1, False, False, False, False
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
                    self._go_on(joined, to_the_end=False)
        except epd.Error:
            pass
        finally:
            self.lock.release()

    # ---- inside ------------------------------------------------------------------------------------

    def _may_repeat(self, stream: Any) -> bool:
        """Not while the caller is about to take results, and on GPUs not before he has waited for the end: there his
        stream copies inputs and outputs."""
        return not self._untaken and (self._unended is None or stream is None)

    def _make_up_for(self, joined: Resumable, stream: Any) -> None:
        """If it may. Else the caller's next call does."""
        if not self._may_repeat(stream):
            return
        if not self._due and self._ticket is not None and self._ticket.pending:
            return  # the break has not reached it yet
        with self._in_stream(stream):
            if not self._due and (self._ticket is None or not self._advance(joined)):
                self._advance(joined)
            self._go_on(joined, to_the_end=False)

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

    def _go_on(self, joined: Resumable, to_the_end: bool = True) -> None:
        """Until the last operation is not due, and the other one has ended, or is at least in flight."""
        while self._due or (self._unended is not None and self._outcome is None):
            if self._repeated:
                assert self._last is not None
                self._last.repeated()
                self._due = self._repeated = False
                continue
            if self._ticket is None:
                self._submit(joined)
            if self._ticket is None or self._due or to_the_end:
                self._advance(joined)
            else:
                return

    def _submit(self, joined: Resumable) -> None:
        step, attempt = (self._last, Attempt.REPEAT) if self._due else (self._unended, self._attempt)
        assert step is not None
        with contextlib.suppress(*epd.BREAKS):
            self._ticket = joined.submit_now(step.submit, attempt)
            if not self._due:
                self._attempt = Attempt.AGAIN

    def _advance(self, joined: Resumable) -> bool:
        """Takes the end of what is in flight, or resumes. True: there was a break, and what is due is known. Raises
        RankLost, and what the repetition has ended with: that stays due."""
        ticket = self._ticket
        try:
            result, at = joined.group.advance(ticket)
        except epd.Error as error:
            self._ticket = None
            self.out = self.out or isinstance(error, epd.RankLost)
            if self.out or self._due or ticket is None:
                raise
            self._outcome = error
            return False
        self._ticket = None
        if result is not None and result.op_index < at.resume_op:
            if self._due:
                self._repeated = True
            else:
                self._outcome = result
            return False
        self._due, self._repeated = self._last is not None and self._last_index >= at.resume_op, False
        if isinstance(self._outcome, epd.Result) and self._outcome.op_index >= at.resume_op:
            self._outcome = None  # it went well here, and not on another rank
        return True


def _is_well(joined: Resumable) -> bool:
    try:
        joined.group.check()
    except epd.BREAKS:
        return False
    return True
