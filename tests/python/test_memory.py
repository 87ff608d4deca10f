"""Arrays that epd.Memory takes: their types and sizes against the group's, and where they are."""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any, Iterator

import pytest
from conftest import Daemon, run_python, shape

np = pytest.importorskip("numpy")

import epd  # noqa: E402
from epd.buffers import DeviceArray, RegionShape  # noqa: E402

H, K, T = 128, 2, 8
X = np.full((2, H), 0x3F80, np.uint16)


@pytest.fixture
def group(daemon: Daemon) -> Iterator[epd.Group]:
    formats = [epd.RowFormat(epd.Payload.FP8)]
    config = shape(num_experts=2, max_tokens=T, hidden=H, topk=K, num_biases=1, more_formats=formats)
    with epd.attach(daemon.socket, "host:0") as session, session.join(config) as joined:
        joined.buffers(0).topk_idx[:4] = memoryview(np.array([0, 1, 1, 0], np.int32))
        yield joined


def refused(call: Any) -> epd.InvalidArgument:
    with pytest.raises(epd.InvalidArgument) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("address", [-1, 0, 1 << 64])
def test_an_address_that_is_none(address: int) -> None:
    for fields in ({"x": address}, {"recv_x": address}, {"bias": (address, None)}):
        error = refused(lambda fields=fields: epd.Memory(**fields))
        assert error.value == str(address) and error.allowed == f"None, an address of 1 .. {(1 << 64) - 1}, or an array"


def test_a_bool_is_no_address() -> None:
    for fields in ({"x": True}, {"out": False}, {"bias": (None, True)}):
        with pytest.raises(TypeError, match=r"is (True|False); allowed: None, an address, or an array"):
            epd.Memory(**fields)


def test_a_scalar_of_numpy_is_no_array() -> None:
    """It says that it has memory, but it is that of a copy."""
    assert epd.Memory(x=np.int64(4096))._raw.x == 4096 and epd.Memory(bias=(np.uint16(5), None))._raw.bias[0] == 5
    record = np.zeros(1, [("a", "i4")])[0]
    for scalar in (np.float32(1), np.bool_(True), record, np.datetime64(0, "s")):
        with pytest.raises(TypeError, match=r"memory.x is .*; allowed: None, an address, or an array"):
            epd.Memory(x=scalar)
    one = np.array(7, np.int32)  # an array of no dimension
    assert epd.Memory(x=one)._raw.x == one.ctypes.data


def test_an_array_that_has_no_buffer() -> None:
    assert "memory.x is an array without a buffer" in str(refused(lambda: epd.Memory(x=np.zeros(2, "M8[s]"))))
    closed = mmap.mmap(-1, 4096)
    closed.close()
    assert "memory.x is an array without a buffer" in str(refused(lambda: epd.Memory(x=closed)))


@pytest.mark.parametrize(
    "name, array, given, allowed",
    [
        ("x", np.zeros((2, H), np.float32), "float32", "bfloat16, uint16, int16"),
        ("x", np.zeros((2, H), np.float16), "float16", "bfloat16, uint16, int16"),
        ("x", np.zeros((2, H), ">u2"), ">u2", "bfloat16, uint16, int16"),
        ("topk_idx", np.zeros((2, K), np.int64), "int64", "int32, uint32"),
        ("topk_weights", np.zeros((2, K), np.float64), "float64", "float32"),
        ("recv_x", np.zeros((T, H), np.float32), "float32", "bfloat16, uint16, int16"),
        ("recv_src", np.zeros((T, 2), np.int64), "int64", "int32, uint32"),
        ("rank_offsets", np.zeros(2, np.int64), "int64", "int32, uint32"),
        ("x", memoryview(np.zeros(2 * H, np.float64)), "float64", "bfloat16, uint16, int16"),
    ],
)
def test_a_type_that_is_not_the_groups(group: epd.Group, name: str, array: Any, given: str, allowed: str) -> None:
    memory = epd.Memory(**{name: array})
    error = refused(lambda: group.dispatch(0, 2, memory=memory))
    assert (error.field, error.value, error.allowed) == (f"memory.{name}.dtype", given, allowed)
    group.dispatch(0, 2).wait()  # nothing was submitted


@pytest.mark.parametrize("name", ["y", "out", "bias"])
def test_a_type_that_is_not_that_of_a_combine(group: epd.Group, name: str) -> None:
    dispatch = group.dispatch(0, 2)
    dispatch.wait()
    wrong: Any = np.zeros((T, H), np.float32)
    memory = epd.Memory(bias=(wrong, None)) if name == "bias" else epd.Memory(**{name: wrong})
    error = refused(lambda: group.combine(0, dispatch.handle, num_biases=1, memory=memory))
    assert error.field == f"memory.{'bias[0]' if name == 'bias' else name}.dtype" and error.value == "float32"


@pytest.mark.parametrize(
    "name, array, need",
    [
        ("x", np.zeros((1, H), np.uint16), f"{2 * H * 2} or more, for num_tokens 2"),
        ("x", np.zeros((0, H), np.uint16), f"{2 * H * 2} or more, for num_tokens 2"),
        ("topk_idx", np.zeros((2, 1), np.int32), f"{2 * K * 4} or more, for num_tokens 2"),
        ("recv_x", np.zeros((2, H), np.uint16), f"{T * H * 2} or more, for the group's rows, as recv_rows is 0"),
        ("expert_counts", np.zeros(1, np.int32), "8 or more, for the group"),
        ("x", bytearray(2 * H), f"{2 * H * 2} or more, for num_tokens 2"),
    ],
)
def test_too_small(group: epd.Group, name: str, array: Any, need: str) -> None:
    memory = epd.Memory(**{name: array})
    error = refused(lambda: group.dispatch(0, 2, memory=memory))
    assert error.field == f"memory.{name}.nbytes" and error.allowed == need


def test_room_for_rows(group: epd.Group) -> None:
    error = refused(lambda: group.dispatch(0, 2, memory=epd.Memory(recv_x=np.zeros((2, H), np.uint16), recv_rows=3)))
    assert error.allowed == f"{3 * H * 2} or more, for recv_rows 3"
    rows = np.zeros((2, H), np.uint16)
    assert group.dispatch(0, 2, memory=epd.Memory(x=X, recv_x=rows, recv_rows=2)).wait().num_recv_rows == 2
    assert (rows == 0x3F80).all()


def test_out_has_room_for_the_tokens_of_the_handle(group: epd.Group) -> None:
    dispatch = group.dispatch(0, 2, memory=epd.Memory(x=X))
    dispatch.wait()
    again = group.dispatch(1, handle=dispatch.handle, memory=epd.Memory(x=X))
    again.wait()
    for handle in (dispatch.handle, again.handle):
        memory = epd.Memory(y=X, out=np.zeros((1, H), np.uint16))
        error = refused(lambda handle=handle, memory=memory: group.combine(0, handle, memory=memory))
        assert error.field == "memory.out.nbytes"
    error = refused(lambda: group.dispatch(1, handle=dispatch.handle, memory=epd.Memory(x=X[:1])))
    assert error.field == "memory.x.nbytes"
    out = np.zeros((2, H), np.uint16)
    group.combine(0, dispatch.handle, memory=epd.Memory(y=X, out=out)).wait()  # y has the rows that came
    assert (out == 0x3F80).all()


def test_y_has_the_rows_that_came(group: epd.Group) -> None:
    dispatch = group.dispatch(0, 2, memory=epd.Memory(x=X))
    short = epd.Memory(y=X)
    error = refused(lambda: group.combine(1, dispatch.handle, memory=short))
    text = f"{T * H * 2} or more, for the group's rows: recv_rows is 0, and the dispatch was not waited for"
    assert (error.field, error.allowed) == ("memory.y.nbytes", text)
    assert dispatch.wait().num_recv_rows == 2
    group.combine(1, dispatch.handle, memory=short).wait()
    error = refused(lambda: group.combine(1, dispatch.handle, memory=epd.Memory(y=X[:1])))
    assert error.allowed == f"{2 * H * 2} or more, for the 2 rows that the dispatch has brought"
    error = refused(lambda: group.combine(1, dispatch.handle, memory=epd.Memory(y=X[0, : H // 2])))
    assert error.value == str(H)  # bytes: less than a row
    group.combine(1, dispatch.handle, memory=epd.Memory(y=np.zeros((T, H), np.uint16))).wait()

    hooked, done = group.dispatch(0, 1, memory=epd.Memory(x=X)), threading.Event()
    hooked.on_complete(lambda result: done.set())
    assert done.wait(10)
    group.combine(1, hooked.handle, memory=epd.Memory(y=X[:1])).wait()


@pytest.mark.parametrize("make", [lambda: bytearray(2 * H * 2), lambda: mmap.mmap(-1, 4096)])
def test_memory_keeps_its_buffers(group: epd.Group, make: Any) -> None:
    buffer = make()
    memory = epd.Memory(x=buffer)
    with pytest.raises(BufferError):
        buffer.clear() if isinstance(buffer, bytearray) else buffer.close()
    group.dispatch(0, 2, memory=memory).wait()
    del memory
    buffer.clear() if isinstance(buffer, bytearray) else buffer.close()


def test_a_handle_of_another_group(group: epd.Group, daemon: Daemon) -> None:
    with epd.attach(daemon.socket, "host:0") as session, session.join(shape(max_tokens=T, hidden=H)) as other:
        theirs = other.dispatch(0, 0)
        theirs.wait()
        ours = group.dispatch(0, 2)
        ours.wait()
        for call in (lambda: group.combine(0, theirs.handle), lambda: group.dispatch(1, handle=theirs.handle)):
            error = refused(call)
            assert error.field == "handle" and group.config.name in str(error.allowed)
        group.combine(0, ours.handle).wait()


def test_no_tokens(group: epd.Group) -> None:
    memory = epd.Memory(x=X[:0], topk_idx=np.zeros((0, K), np.int32), recv_x=np.zeros((T, H), np.uint16))
    assert group.dispatch(0, 0, memory=memory).wait().num_recv_rows == 0
    assert refused(lambda: group.dispatch(0, 1, memory=memory)).field == "memory.x.nbytes"


def test_a_row_format_has_its_own_types(group: epd.Group) -> None:
    """Checked once for each row format."""
    memory = epd.Memory(x=X)
    group.dispatch(0, 2, memory=memory).wait()
    error = refused(lambda: group.dispatch(0, 2, row_format=1, memory=memory))
    assert error.value == "uint16" and error.allowed == "uint8, int8, float8_e4m3fn"
    group.dispatch(0, 2, memory=memory).wait()
    assert refused(lambda: group.dispatch(0, 2, row_format=2, memory=memory)).field == "row_format"


def test_opaque_rows_are_of_any_type(daemon: Daemon) -> None:
    config = shape(num_experts=2, hidden=H, payload=epd.Payload.OPAQUE, opaque_bytes=64)
    with epd.attach(daemon.socket) as session, session.join(config) as group:
        given, got = np.arange(16, dtype=np.float32)[None], np.zeros((T, 16), np.float32)
        group.buffers(0).topk_idx[0] = 1
        group.dispatch(0, 1, memory=epd.Memory(x=given, recv_x=got)).wait()
        assert (got[0] == given[0]).all()


def test_a_checked_memory_is_not_checked_again(group: epd.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = epd.Memory(x=X)
    group.dispatch(0, 2, memory=memory).wait()
    monkeypatch.setattr(epd.memory, "_check_type", None)
    group.dispatch(0, 2, memory=memory).wait()
    group.dispatch(0, 1, memory=memory).wait()


def test_what_is_no_memory(group: epd.Group) -> None:
    with pytest.raises(TypeError, match="memory is 'x'; allowed: None, or a Memory"):
        group.dispatch(0, 1, memory="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="memory is 5; allowed: None, or a Memory"):
        group.combine(0, group.dispatch(0, 0).handle, memory=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"memory is DeviceArray\(.*; allowed: None, or a Memory"):
        group.dispatch(0, 1, memory=DeviceArray(4096, RegionShape((4,), "f"), None))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="memory.bias is None; allowed: a pair"):
        epd.Memory(bias=None)  # type: ignore[arg-type]


def test_numbers_of_numpy(group: epd.Group) -> None:
    numpy = pytest.importorskip("numpy")
    one = numpy.int64(1)
    assert epd.Memory(recv_rows=one)._recv_rows == 1
    ticket = group.dispatch(numpy.int32(0), one)
    assert ticket.wait(numpy.int64(20000)).num_recv_rows >= 0
    several: Any = numpy.ones(2)
    with pytest.raises(TypeError, match=r"omit_weights is array\(\[1., 1.\]\); allowed: True or False"):
        group.dispatch(0, omit_weights=several)
    with pytest.raises(TypeError, match=r"slot is array\(.*\); allowed: an integer"):
        group.combine(several, ticket.handle)
    assert group.active(numpy.int32(0)) and group.buffers(0, numpy.int64(0)).x
    for call in (ticket.wait, group.resume, group.active):
        with pytest.raises(TypeError, match=r"is 1\.0; allowed: "):
            call(numpy.float64(1))


def test_numbers_come_with_the_package() -> None:
    code = """
import epd
import sys
assert "numpy" not in sys.modules
import numpy
assert epd.numbers.dequantize(numpy.zeros((0, 128), "u1"), numpy.ones((0, 1), "f4")).shape == (0, 128)
assert epd.numbers.dequantize(numpy.full((2, 256), 0x38, "u1"), numpy.full((2, 2), 3, "f4")).tolist() == [[3.0] * 256] * 2
assert not hasattr(epd, "numbres")
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_arrays_of_ctypes(group: epd.Group) -> None:
    x = (ctypes.c_uint16 * (2 * 128))()
    idx = (ctypes.c_int32 * 4)(-1, -1, -1, -1)
    weights = (ctypes.c_float * 4)()
    group.dispatch(0, 2, memory=epd.Memory(x=x, topk_idx=idx, topk_weights=weights)).wait()
    with pytest.raises(epd.InvalidArgument, match="memory.topk_idx.dtype is int64; allowed: int32"):
        group.dispatch(0, 2, memory=epd.Memory(topk_idx=(ctypes.c_int64 * 4)()))


def test_tensors(group: epd.Group) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (Debian: python3-torch)")
    error = refused(lambda: epd.Memory(x=torch.empty(2, H, dtype=torch.bfloat16, device="meta")))
    assert (error.field, error.value) == ("memory.x.device", "meta")
    error = refused(lambda: group.dispatch(0, 2, memory=epd.Memory(x=torch.ones(2, H))))
    assert error.value == "float32" and error.allowed == "bfloat16, uint16, int16"
    error = refused(lambda: group.dispatch(0, 2, memory=epd.Memory(x=torch.ones(0, H, dtype=torch.bfloat16))))
    assert error.field == "memory.x.nbytes" and error.value == "0"
    got = torch.zeros(T, H, dtype=torch.bfloat16)
    group.dispatch(0, 2, memory=epd.Memory(x=torch.ones(2, H, dtype=torch.bfloat16), recv_x=got)).wait()
    assert (got[:2] == 1).all()


def test_a_tensors_storage_is_kept_whatever_becomes_of_the_tensor(group: epd.Group) -> None:
    """Another tensor in its place is not what is written to."""
    torch = pytest.importorskip("torch", reason="torch is not installed (Debian: python3-torch)")

    def zeros() -> Any:
        return torch.zeros(T, H, dtype=torch.bfloat16)

    got, x = zeros(), torch.nn.Parameter(torch.ones(2, H, dtype=torch.bfloat16))
    memory, read = epd.Memory(recv_x=got), epd.Memory(x=x)
    addresses = {got.data_ptr(), x.data_ptr()}
    got.data = zeros()
    x.data = torch.zeros(1, H, dtype=torch.bfloat16)  # too small: the memory has another one
    others = [got, *(zeros() for _ in range(16))]
    assert addresses.isdisjoint(other.data_ptr() for other in others)
    group.buffers(0).x[0] = 0x3F80
    group.dispatch(0, 2, memory=memory).wait()
    assert not any(other.any() for other in others)
    group.dispatch(0, 2, memory=read).wait()
    assert (group.tensors(0).recv_x[:2] == 1).all()


def test_tensors_that_are_no_plain_memory() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (Debian: python3-torch)")
    x = torch.ones(2, H, dtype=torch.bfloat16)
    error = refused(lambda: epd.Memory(x=torch._neg_view(x)))
    assert "memory.x.is_neg() is True; allowed: memory.x.resolve_neg()" in str(error)
    error = refused(lambda: epd.Memory(x=x.to_sparse()))
    assert "memory.x.layout is torch.sparse_coo; allowed: torch.strided" in str(error)


def test_arrays_of_a_gpu() -> None:
    class OfGpu:
        def __init__(self, **fields: Any) -> None:
            whole = {"shape": (2, H), "typestr": "<i2", "data": (4096, False), "version": 3}
            self.__cuda_array_interface__ = {**whole, **fields}

    epd.Memory(recv_x=OfGpu(strides=(2 * H, 2)))
    assert "memory.x has strides (512, 2)" in str(refused(lambda: epd.Memory(x=OfGpu(strides=(4 * H, 2)))))
    epd.Memory(x=OfGpu(data=(4096, True)))
    assert "read-only" in str(refused(lambda: epd.Memory(recv_x=OfGpu(data=(4096, True)))))


def test_memory_of_a_gpu_is_not_for_a_host_device(group: epd.Group) -> None:
    class OfGpu:
        __cuda_array_interface__ = {"shape": (2, H), "typestr": "<i2", "data": (4096, False), "version": 3}

    error = refused(lambda: group.dispatch(0, 2, memory=epd.Memory(x=OfGpu())))
    assert (error.field, error.value) == ("memory.x.device", "cuda")
