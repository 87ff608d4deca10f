"""Going on after failures: the loop of the guide, "Recovery".

    recovery.py RANK

Runs one rank of a group of two, until Ctrl-C. To try it: start it with 0 and with 1. Then kill an engine,
or kill one of the two with -9 and start it again.
"""

import sys
import time
from array import array

import epd


def run(group, submit, end):
    """Runs operations up to end - 1 of the group: from 0, or from where a group is that runs already.

    submit(i) makes the inputs of operation i, submits it and returns its ticket. It is called again
    for what a break has undone, also if the operation had completed on this rank.
    """
    ticket = None
    while True:
        _, at = group.advance(ticket)  # raises RankLost if the group has ended
        if at.resume_op >= end:
            return
        ticket = None
        try:
            ticket = submit(at.resume_op)
        except epd.BREAKS:
            pass


def main(rank):
    tokens, hidden, experts = 16, 128, 8
    shape = {"num_experts": experts, "max_tokens": tokens, "hidden": hidden, "topk": 1}
    handles = {}
    with epd.attach() as session:
        config = epd.GroupConfig(name="recovery", num_ranks=2, rank=rank, policy=epd.Policy.DEGRADE, **shape)
        group = session.join(config)

        def submit(i):
            slot = i // 2 % 2  # rounds of a dispatch and a combine take turns on two slots
            b = group.buffers(slot)
            if i % 2 == 0:
                if i % 200 == 0:
                    print(f"rank {rank}: operation {i}, active: {[r for r in (0, 1) if group.active(r)]}", flush=True)
                time.sleep(0.01)
                b.x[:] = array("H", [0x3F80 + i % 64] * len(b.x))
                b.topk_idx[:] = array("i", [t % experts for t in range(tokens)])
                dispatch = group.dispatch(slot, tokens)
                handles[slot] = dispatch.handle
                return dispatch
            rows = b.rank_offsets[2]
            b.y[: rows * hidden] = b.recv_x[: rows * hidden]  # experts that change nothing
            return group.combine(slot, handles.get(slot))  # None: dispatched before this rank joined

        run(group, submit, sys.maxsize)


if __name__ == "__main__":
    if sys.argv[1:] not in (["0"], ["1"]):
        sys.exit("usage: recovery.py RANK; allowed: 0, 1")
    main(int(sys.argv[1]))
