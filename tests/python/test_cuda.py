"""CUDA devices, on the fake driver: addresses, streams, calls in a captured graph."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Callable

import pytest
from conftest import BUILD, ROOT, Daemon, run_python

FAKE = BUILD / "lib/fake_cuda"

pytestmark = pytest.mark.skipif(
    not (FAKE / "libcuda.so.1").exists(), reason="the fake CUDA driver is not built"
)

DRIVER = """
import ctypes, sys, epd
cuda = ctypes.CDLL("libcuda.so.1")
def must(result): assert result == 0, result
def address(value): return ctypes.c_uint64(value)
must(cuda.cuInit(0))
context, stream = ctypes.c_void_p(), ctypes.c_void_p()
must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)); must(cuda.cuCtxSetCurrent(context))
must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
def put(array, data): must(cuda.cuMemcpyHtoDAsync_v2(address(array.address), data, len(data), stream))
def get(array, count):
    data = ctypes.create_string_buffer(count)
    must(cuda.cuMemcpyDtoH_v2(data, address(array.address), ctypes.c_size_t(count)))
    return data.raw
class Stream:
    cuda_stream = stream.value
"""


@pytest.fixture
def cuda_daemon(own_daemon: Callable[..., Daemon]) -> Daemon:
    lines = 'devices.host = 0\ndevices.cuda = [0, 1]\ndevices.sms = 16'
    return own_daemon(lines, {"LD_LIBRARY_PATH": str(FAKE)})


@pytest.mark.parametrize("defer", [False, True])
def test_a_round_trip_in_a_stream(cuda_daemon: Daemon, defer: bool) -> None:
    code = (
        DRIVER
        + f"""
defer = {defer}
session = epd.attach(sys.argv[1], "cuda:0")
group = session.join(epd.GroupConfig(name="s", num_ranks=1, num_experts=4, max_tokens=8, hidden=128, topk=1))
b = group.buffers(0)
interface = b.x.__cuda_array_interface__
assert interface["shape"] == (8, 128) and interface["typestr"] == "<i2" and interface["version"] == 3
assert interface["data"] == (b.x.address, False) and b.x.nbytes == 2048 and b.topk_idx.nbytes == 32
assert b.recv_scales is None and group.buffers(0) is b
rows = b"".join((0x3F80 + i % 100).to_bytes(2, "little") for i in range(1024))
pinned = ctypes.c_void_p(); must(cuda.cuMemHostAlloc(ctypes.byref(pinned), 4096, 0))
put(b.x, rows); put(b.topk_idx, b"\\1\\0\\0\\0" * 8)
dispatch = group.dispatch(0, 8, stream=Stream(), defer_receive=defer)
if defer: dispatch.wait_on_stream(stream.value)
must(cuda.cuMemcpyDtoDAsync_v2(address(b.y.address), address(b.recv_x.address), ctypes.c_size_t(2048), stream))
combine = group.combine(0, dispatch.handle, stream=stream.value)
must(cuda.cuStreamSynchronize(stream))
assert group.advance(dispatch)[0].num_recv_rows == 8 and group.advance(combine)[1].resume_op == 2
assert not combine.pending and group.advance(combine)[0] is None  # it is empty
assert get(b.out, 2048) == rows and get(b.recv_x, 2048) == rows
try: group.numpy(0)
except epd.InvalidArgument as error: assert "host devices" in str(error)
array = b.x
assert group.leave() is False  # the array keeps the membership
assert session.info.device_kind == epd.DeviceKind.CUDA
del array, b, dispatch, combine
import gc; gc.collect()
assert group.leave() is True
print("done")
"""
    )
    done = run_python(code, cuda_daemon.socket, LD_LIBRARY_PATH=str(FAKE))
    assert done.stdout == "done\n", done.stdout + done.stderr


# A session, and 1 MiB at `at` that can be registered in it.
ALLOCATED = """
def allocate(size):
    made = ctypes.c_uint64()
    must(cuda.cuMemAlloc_v2(ctypes.byref(made), ctypes.c_size_t(size)))
    return made.value
at = allocate(1 << 20)
session = epd.attach(sys.argv[1], "cuda:0")
"""


def test_rows_in_registered_memory(cuda_daemon: Daemon) -> None:
    code = (
        DRIVER
        + ALLOCATED
        + """
try: session.register(at + 8, 64)
except epd.InvalidArgument as error: assert "a multiple of 16" in str(error), error
session.register(at, 1 << 20)
group = session.join(epd.GroupConfig(name="own", num_ranks=1, num_experts=4, max_tokens=8, hidden=128, topk=1))
b = group.buffers(0)
class At:
    def __init__(self, offset): self.address = at + offset
x, recv_x, y, out = At(0), At(4096), At(65536), At(81920)
rows = b"".join((0x3F80 + i % 100).to_bytes(2, "little") for i in range(1024))
zeros = bytes(2048)
for place in (x, recv_x, out, b.x, b.recv_x, b.out): put(place, zeros)
def run():
    put(x, rows); put(b.topk_idx, b"\\1\\0\\0\\0" * 8)
    memory = epd.Memory(x=x.address, recv_x=recv_x.address)
    dispatch = group.dispatch(0, 8, stream=Stream(), memory=memory)
    must(cuda.cuMemcpyDtoDAsync_v2(address(y.address), address(recv_x.address), ctypes.c_size_t(2048), stream))
    back = epd.Memory(y=y.address, out=out.address)
    combine = group.combine(0, dispatch.handle, stream=stream.value, memory=back)
    must(cuda.cuStreamSynchronize(stream))
    assert dispatch.wait().num_recv_rows == 8 and combine.wait().status == epd.Status.OK
    assert get(recv_x, 2048) == rows and get(out, 2048) == rows
run()
copied = [get(region, 2048) != zeros for region in (b.x, b.recv_x, b.out)]
assert copied == [False] * 3, copied
session.unregister(at)
run()
assert get(b.x, 2048) == rows
try: session.unregister(at)
except epd.NotFound as error: assert "no registered range" in str(error), error
print("done")
"""
    )
    done = run_python(code, cuda_daemon.socket, LD_LIBRARY_PATH=str(FAKE))
    assert done.stdout == "done\n", done.stdout + done.stderr


def test_registered_memory_of_any_size(cuda_daemon: Daemon) -> None:
    """torch takes memory in segments of 2 or 20 MiB, or of multiples of 2 MiB, and a tensor has a part of one. With
    4 MiB the first operation failed."""
    code = (
        DRIVER
        + ALLOCATED
        + """
MIB = 1 << 20
class At:
    def __init__(self, address): self.address = address
rows = b"".join((0x3F80 + i % 100).to_bytes(2, "little") for i in range(1024))
for number, size in enumerate((1, 4097, MIB, 4 * MIB, 4 * MIB + 1, 10 * MIB + 1, 20 * MIB)):
    segment = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
    at = allocate(segment)
    session.register(at, size)
    config = epd.GroupConfig(name=f"part-{number}", num_ranks=1, num_experts=4, max_tokens=8, hidden=128, topk=1)
    group = session.join(config)
    b, recv_x = group.buffers(0), At(at)
    put(b.x, rows); put(b.topk_idx, b"\\1\\0\\0\\0" * 8); put(b.recv_x, bytes(2048))
    dispatch = group.dispatch(0, 8, stream=Stream(), memory=epd.Memory(recv_x=recv_x.address))
    must(cuda.cuStreamSynchronize(stream))
    assert dispatch.wait().num_recv_rows == 8 and get(recv_x, 2048) == rows, size
    in_place = get(b.recv_x, 2048) != rows
    assert in_place == (size > 1), size  # what finds no room there is copied
    dispatch = b = None
    group.leave()
    session.unregister(at)
print("done")
"""
    )
    done = run_python(code, cuda_daemon.socket, LD_LIBRARY_PATH=str(FAKE))
    assert done.stdout == "done\n", done.stdout + done.stderr


def test_what_can_be_registered(cuda_daemon: Daemon) -> None:
    code = (
        DRIVER
        + ALLOCATED
        + """
group = session.join(epd.GroupConfig(name="own", num_ranks=1, num_experts=4, max_tokens=8, hidden=128, topk=1))
class Array:
    __cuda_array_interface__ = {"version": 3, "shape": (4, 8), "typestr": "<f4", "data": (at, False)}
def overlaps(bytes):
    try: session.register(at, 1 << 20)
    except epd.InvalidArgument as error: return f" {bytes} bytes at {at:#x}," in str(error)
session.register(Array())
assert overlaps(128)
session.unregister(Array())
x = group.buffers(0).x
session.register(x)
session.unregister(x)
def refused(said, *arguments):
    try: session.register(*arguments)
    except epd.InvalidArgument as error: assert said in str(error), error
    else: raise AssertionError(said)
refused("bytes is None; allowed: a number, as memory is an address", at)
refused("bytes is -1; allowed: 0 .. 18446744073709551615", at, -1)
refused("bytes is 18446744073709551632; allowed: 0 .. 18446744073709551615", at, (1 << 64) + 16)
refused("address is 0x0", None, 16)
class Strided(Array):
    __cuda_array_interface__ = dict(Array.__cuda_array_interface__, strides=(64, 4))
try: session.register(Strided())
except epd.InvalidArgument as error: assert "INVALID_ARGUMENT: memory has strides (64, 4)" in str(error), error
else: raise AssertionError("strides")
print("done")
"""
    )
    done = run_python(code, cuda_daemon.socket, LD_LIBRARY_PATH=str(FAKE))
    assert done.stdout == "done\n", done.stdout + done.stderr


def test_arrays_that_no_gpu_reaches(cuda_daemon: Daemon) -> None:
    """They are refused, where a kernel would fault; pinned tensors are taken."""
    code = """
import sys, types
import epd
with epd.attach(sys.argv[1]) as session:
    group = session.join(epd.GroupConfig(name="far", num_ranks=1, num_experts=4, max_tokens=8, hidden=128, topk=1))
    try: group.dispatch(0, 1, stream=0, memory=epd.Memory(x=bytearray(256)))
    except epd.InvalidArgument as error: assert error.field == "memory.x.device" and error.value == "cpu", error
    else: raise AssertionError("taken")
    class Pinned:
        dtype, device = "torch.bfloat16", types.SimpleNamespace(type="cpu")
        def data_ptr(self): return 4096
        def is_contiguous(self): return True
        def numel(self): return 128
        def element_size(self): return 2
        def is_pinned(self): return True
    epd.Memory(x=Pinned()).check(group._shapes[0], "dispatch", 1, None)
"""
    done = run_python(code, cuda_daemon.socket, LD_LIBRARY_PATH=str(FAKE))
    assert done.returncode == 0, done.stderr


def test_the_graph_example(cuda_daemon: Daemon) -> None:
    command = [
        sys.executable,
        str(ROOT / "client/python/examples/moe_graph.py"),
        "--ranks",
        "2",
        cuda_daemon.socket,
    ]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(FAKE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("5 replays right") == 2


def test_a_choice_that_is_no_expert_is_told_to_all_ranks(cuda_daemon: Daemon) -> None:
    """The status has its value, by which deep_ep's ranks ask for larger groups. After a resume the group continues,
    with its handles."""
    code = (
        DRIVER
        + """
import threading
def on_both(call):
    made = [None, None]
    def run(rank):
        try: made[rank] = call(rank)
        except epd.Error as error: made[rank] = error
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return made
contexts, streams = [ctypes.c_void_p() for _ in range(2)], [ctypes.c_void_p() for _ in range(2)]
def use_gpu(rank):
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(contexts[rank]), rank))
    must(cuda.cuCtxSetCurrent(contexts[rank]))
for rank in range(2):
    use_gpu(rank)
    must(cuda.cuStreamCreate(ctypes.byref(streams[rank]), 1))
sessions = [epd.attach(sys.argv[1], f"cuda:{rank}") for rank in range(2)]
shape = dict(name="asks", num_ranks=2, num_experts=4, max_tokens=8, hidden=128, topk=1, num_handles=3, depth=1)
groups = on_both(lambda rank: sessions[rank].join(epd.GroupConfig(rank=rank, **shape)))
def dispatch(rank, choice, keep=True):
    use_gpu(rank)
    must(cuda.cuMemcpyHtoD_v2(address(groups[rank].buffers(0).topk_idx.address), choice.to_bytes(4, "little"), 4))
    made = groups[rank].dispatch(0, 1, keep_handle=keep, stream=streams[rank].value)
    assert made.counts().num_recv_rows == made.wait().num_recv_rows == 1
    return made.handle
handles = on_both(lambda rank: dispatch(rank, 2 * rank))
for error in on_both(lambda rank: dispatch(rank, (1 << 30) + 77 if rank == 1 else 0, rank == 0)):
    assert f"operation 1: topk_idx[0,0] is {(1 << 30) + 77} on rank 1" in error.text, error
assert [resumed.resume_op for resumed in on_both(lambda rank: groups[rank].resume())] == [1, 1]
on_both(lambda rank: dispatch(rank, 2 * rank))
def combine(rank):
    use_gpu(rank)
    return groups[rank].combine(0, handles[rank], stream=streams[rank].value).wait().status
assert on_both(combine) == [epd.Status.OK] * 2
print("done")
"""
    )
    done = run_python(code, cuda_daemon.socket, LD_LIBRARY_PATH=str(FAKE))
    assert done.stdout == "done\n", done.stdout + done.stderr
