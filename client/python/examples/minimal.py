"""The smallest program: eight tokens to four experts and back. README shows it."""

from array import array

import epd

with epd.attach() as session:  # $EPD_SOCKET, any device
    shape = epd.GroupConfig(name="minimal", num_ranks=1, num_experts=4, max_tokens=8, hidden=128, topk=1)
    group = session.join(shape)  # returns when all ranks are there
    b = group.buffers(0)  # shared with the engine: nothing is copied
    b.x[:] = array("H", [0x3F80] * len(b.x))  # 8 tokens of bf16 ones ...
    b.topk_idx[:] = array("i", [t % 4 for t in range(8)])  # ... and their experts
    dispatch = group.dispatch(0, num_tokens=8)
    rows = dispatch.wait().num_recv_rows  # now b.recv_x holds the rows
    b.y[: rows * 128] = b.recv_x[: rows * 128]  # an expert that changes nothing
    group.combine(0, dispatch.handle).wait()  # now b.out holds the sums
    print(f"received {rows} rows, out begins with {b.out[0]:#x}")
