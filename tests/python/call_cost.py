"""The CPU time of a call from Python, and what it is made of. Prints figures; asserts nothing.

    PYTHONPATH=client/python EPD_LIBRARY=build/dev/lib/libepd.so python3 tests/python/call_cost.py SOCKET

One rank on one host device, no tokens. "call" is the CPU time of the calling thread (CLOCK_THREAD_CPUTIME_ID),
median. "library" is the same C call by ctypes with everything prepared; "ctypes" is a C function that does next
to nothing, called alike, and is in both. "wait" is for an operation that has ended.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from typing import Any, Callable

import epd
from epd import _abi
from epd._library import library

SLOTS = 16
clock = time.thread_time_ns


def cpu_us(
    calls: int, call: Callable[[Any], Any], before: Callable[[int], Any], after: Callable[[Any], Any]
) -> float:
    """Median CPU time of call(before(slot)), less that of reading the clock; after() gets what it returns."""
    times, empty = [], []
    for number in range(calls):
        argument = before(number % SLOTS)
        begin = clock()
        given = call(argument)
        end = clock()
        after(given)
        times.append(end - begin)
        begin = clock()
        end = clock()
        empty.append(end - begin)
    return (statistics.median(times) - statistics.median(empty)) / 1000


def ended(ticket: epd.Ticket) -> epd.Ticket:
    while ticket.pending:
        time.sleep(0.0001)
    return ticket


def measure(group: epd.Group, calls: int) -> None:
    address = group._handle
    assert address is not None
    ticket, routing = ctypes.c_uint64(), ctypes.c_uint64()
    at, routing_at = ctypes.addressof(ticket), ctypes.addressof(routing)
    result = _abi.Result(ctypes.sizeof(_abi.Result))
    dispatch = _abi.DispatchArgs(ctypes.sizeof(_abi.DispatchArgs))
    combine = _abi.CombineArgs(ctypes.sizeof(_abi.CombineArgs))
    result_at, dispatch_at, combine_at = (ctypes.addressof(block) for block in (result, dispatch, combine))
    first = group.dispatch(0, 0)
    first.wait()
    handle = first.handle
    combine.handle = handle.value
    combine.slot = 1
    none = _abi.NO_STREAM

    def same(slot: int) -> int:
        return slot

    def nothing(_: Any) -> None:
        pass

    def wait(given: epd.Ticket) -> epd.Result:
        return given.wait()

    def wait_raw(_: Any) -> None:
        library.epd_ticket_wait(address, ticket.value, epd.FOREVER, 0)

    def wait_ended(given: epd.Ticket) -> Any:
        return library.epd_ticket_wait(address, given._ticket, epd.FOREVER, result_at)

    def submitted(slot: int) -> epd.Ticket:
        return ended(group.noop(slot))

    trivial = cpu_us(calls, lambda _: library.epd_group_rank(address), same, nothing)
    few = min(calls, 3000)
    rows = {
        "noop": (
            cpu_us(calls, group.noop, same, wait),
            cpu_us(calls, lambda slot: library.epd_noop(address, slot, none, at), same, wait_raw),
        ),
        "combine": (
            cpu_us(calls, lambda _: group.combine(1, handle), same, wait),
            cpu_us(calls, lambda _: library.epd_combine(address, combine_at, none, at), same, wait_raw),
        ),
        "dispatch": (
            cpu_us(calls, lambda slot: group.dispatch(slot, 0), same, wait),
            cpu_us(
                calls,
                lambda _: library.epd_dispatch(address, dispatch_at, none, at, routing_at),
                same,
                wait_raw,
            ),
        ),
        "wait": (cpu_us(few, wait, submitted, nothing), cpu_us(few, wait_ended, submitted, nothing)),
    }
    print("us             call   library  (ctypes)    Python")
    for name, (whole, part) in rows.items():
        print(f"{name:8}  {whole:6.2f} us  {part:8.2f}  {trivial:8.2f}  {whole - part:8.2f}")
    print(f"buffers   {cpu_us(calls, group.buffers, same, nothing):6.2f} us  made once for each slot")


def main() -> None:
    parser = argparse.ArgumentParser(description="The CPU time of a call from Python.")
    parser.add_argument("socket")
    parser.add_argument("--calls", type=int, default=20000)
    options = parser.parse_args()
    shape = epd.GroupConfig(
        name="call-cost", num_ranks=1, num_experts=4, max_tokens=8, hidden=128, topk=1, depth=SLOTS
    )
    with epd.attach(options.socket) as session, session.join(shape) as group:
        measure(group, options.calls)


if __name__ == "__main__":
    main()
