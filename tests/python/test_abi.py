"""The ctypes structs, numbers and functions against epd.h, by a C program."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from typing import Any

import pytest
from conftest import ROOT

import epd
from epd import _abi

HEADER = ROOT / "client/include/epd/epd.h"
ENUMS: dict[str, Any] = {
    "epd_status": epd.Status,
    "epd_wait_by": epd.WaitBy,
    "epd_device_kind": epd.DeviceKind,
    "epd_payload": epd.Payload,
    "epd_scale_format": epd.ScaleFormat,
    "epd_layout": epd.Layout,
    "epd_index_type": epd.IndexType,
    "epd_policy": epd.Policy,
    "epd_region": epd.Region,
    "epd_return_weights": epd.ReturnWeights,
    "epd_scale_layout": epd.ScaleLayout,
    "epd_range_format": epd.RangeFormat,
}


def header() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def header_structs() -> dict[str, list[str]]:
    """The structs with `size`, and the names of their fields in order."""
    structs = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \w+;", header(), re.DOTALL):
        structs[name] = re.findall(r"(\w+)(?:\[\d+\])?;", body)
    return structs


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """A C compiler's view of epd.h: sizes, offsets, signedness, numbers."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc)")
    lines = []
    for struct, fields in header_structs().items():
        lines.append(f'say("{struct}", sizeof(struct {struct}));')
        for field in fields:
            member = f"((struct {struct}*)0)->{field}"
            lines.append(f'say("{struct}.{field}", offsetof(struct {struct}, {field}));')
            lines.append(f'say("{struct}.{field}#", sizeof({member}));')
    for enum, kind in ENUMS.items():
        prefix = {"epd_status": "EPD"}.get(enum, enum.upper())
        lines += [f'say("{enum}.{member.name}", {prefix}_{member.name});' for member in kind]
        lines.append(f'say("{enum}#", sizeof(enum {enum}));')
        lines.append(f'say("{enum} unsigned", (enum {enum})-1 > 0);')
    lines += ['say("FOREVER", EPD_FOREVER);', 'say("NO_WAIT", EPD_NO_WAIT);', 'say("ANY_RANK", EPD_ANY_RANK);']
    lines.append('say("NO_STREAM", (long long)(size_t)EPD_NO_STREAM);')
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "abi.c"
    source.write_text(
        "#include <epd/epd.h>\n#include <stdio.h>\n"
        'static void say(const char* what, long long value) { printf("%s %lld\\n", what, value); }\n'
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    program = folder / "abi"
    subprocess.run([compiler, "-w", f"-I{HEADER.parents[1]}", str(source), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {what: int(value) for what, value in (line.rsplit(" ", 1) for line in output.splitlines())}


def test_structs_are_those_of_the_header() -> None:
    assert set(header_structs()) == set(_abi.STRUCTS)


@pytest.mark.parametrize("name", _abi.STRUCTS)
def test_layout(name: str, measured: dict[str, int]) -> None:
    kind = _abi.STRUCTS[name]
    fields = [field[0] for field in kind._fields_]
    assert fields == header_structs()[name]
    assert ctypes.sizeof(kind) == measured[name]
    for field in fields:
        assert getattr(kind, field).offset == measured[f"{name}.{field}"], field
        assert getattr(kind, field).size == measured[f"{name}.{field}#"], field


@pytest.mark.parametrize("name", ENUMS)
def test_numbers(name: str, measured: dict[str, int]) -> None:
    for member in ENUMS[name]:
        assert member.value == measured[f"{name}.{member.name}"]
    assert measured[f"{name}#"] == ctypes.sizeof(_abi.c_enum) and measured[f"{name} unsigned"] == 1
    body = re.search(rf"typedef enum {name} \{{(.*?)\}}", header(), re.DOTALL)
    assert body is not None and len(re.findall(r"=", body[1])) == len(ENUMS[name])


def test_constants(measured: dict[str, int]) -> None:
    assert epd.FOREVER == measured["FOREVER"] and epd.NO_WAIT == measured["NO_WAIT"]
    assert epd.ANY_RANK == measured["ANY_RANK"]
    assert _abi.NO_STREAM == measured["NO_STREAM"] & ctypes.c_size_t(-1).value


def test_functions_are_those_of_the_header() -> None:
    declared = set(re.findall(r"EPD_API [\w* ]+?\b(epd_\w+)\(", header()))
    assert set(_abi.FUNCTIONS) | set(_abi.NOT_CALLED) == declared


def test_functions_take_what_the_header_says() -> None:
    """Counts the arguments, and tells integers of 64 bits, integers of 32, and addresses apart."""
    wide = {"epd_ticket_t": ctypes.c_uint64, "epd_handle_t": ctypes.c_uint64, "size_t": ctypes.c_size_t}
    for name, (_, arguments) in _abi.FUNCTIONS.items():
        text = re.search(rf"\b{name}\((.*?)\);", header(), re.DOTALL)
        assert text is not None
        parameters = [p.strip() for p in text[1].split(",")] if text[1].strip() != "void" else []
        assert len(parameters) == len(arguments), name
        for parameter, argument in zip(parameters, arguments):
            if "*" in parameter:
                expected: Any = ctypes.c_void_p
            else:
                kind = parameter.split()[0]
                integer = {"uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32}.get(kind, ctypes.c_int)
                expected = wide.get(kind, integer)
            assert argument is expected, f"{name}: {parameter}"


def test_every_status_has_its_exception() -> None:
    from epd.errors import CLASSES

    assert set(CLASSES) == set(epd.Status) - {epd.Status.OK}
    for status in CLASSES:
        assert CLASSES[status].status == status and issubclass(CLASSES[status], epd.Error)


def test_versions() -> None:
    assert epd.version() == epd.__version__
    project = re.search(r"project\(epd VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert project is not None and project[1] == epd.__version__
