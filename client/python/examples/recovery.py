"""Going on after failures: the loop of the guide, "Recovery"."""

import time

import epd

BREAKS = (epd.RankLost, epd.DeadlineExceeded, epd.EngineRestarted, epd.Aborted)


def run(group, submit, end):
    """Runs operations 0 .. end - 1 of the group.

    submit(i) makes the inputs of operation i, submits it and returns its ticket. It is called again
    for what a break has undone, also if the operation had completed on this rank.
    """
    next_op, ticket = 0, None
    while next_op < end:
        try:
            ticket = ticket or submit(next_op)
            ticket.wait()
            next_op, ticket = next_op + 1, None
        except epd.WouldBlock:  # the slot is busy, or the ring is full
            time.sleep(0.001)
        except BREAKS:
            if ticket is None or not ticket.pending:  # else: it only takes longer, wait again
                ticket = None
                next_op = group.resume().resume_op  # raises RankLost if the group has ended
