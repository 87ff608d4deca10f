#!/usr/bin/env python3
"""The fields of a group's configuration, once: TABLE. What repeats them in other files is generated from it.

    proto/fields.py            writes the generated parts, between "[fields.py: PART]" and "[end]"
    proto/fields.py --check    exit status 1 if one differs, and its name
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Callable, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent


class Field(NamedTuple):
    """A field of epd_group_config_t. Fields of which all ranks give the same are in GroupShape too."""

    name: str
    text: str  # {Payload.FP8} is a constant, as each language writes it
    kind: str = "u32"  # u32, i32, text, list; or an enumeration
    low: str = "0"  # numbers, or constants of proto/shape.h
    high: str = ""
    multiple: str = "1"
    zero: str = ""  # what 0 means: a constant or number, of an enumeration the enumerator; "": 0, or the daemon decides
    allowed: str = ""  # in words, if the range does not say it
    shape: bool = True
    since: str = "0.1.0"

    def enumeration(self) -> bool:
        return self.kind[0].isupper()


# In the order of the C struct. New fields come last.
TABLE = (
    Field("name", "1..63 characters of [A-Za-z0-9._-]", "text", shape=False),
    Field("rank", "0..num_ranks-1, or {ANY_RANK}: any free one", "i32", shape=False,
          allowed="0 .. num_ranks - 1, or ANY_RANK (-1)"),
    Field("num_ranks", "R, 1..1024", low="1", high="kMaxRanks"),
    Field("num_experts", "E: a multiple of R, at most 4096. Expert e lives on rank e / (E/R)", low="1",
          high="kMaxExperts", allowed="1 .. 4096, a multiple of num_ranks"),
    Field("max_tokens", "T, 1..65536: the most tokens of a dispatch. Sizes of buffers follow from it", low="1",
          high="kMaxTokens"),
    Field("hidden", "H: a multiple of 8, at most 16384", low="kHiddenMultiple", high="kMaxHidden",
          multiple="kHiddenMultiple"),
    Field("topk", "K, 1..32", low="1", high="kMaxTopk"),
    Field("depth", "buffer slots, 1..16; 0: 4", low="1", high="kMaxDepth", zero="kDefaultDepth"),
    Field("payload", "with scale_format: row format 0", "Payload", high="3", zero="BF16"),
    Field("index_type", "of topk_idx and recv_topk_idx", "IndexType", high="1", zero="INT32"),
    Field("policy", "what becomes of the group when a rank is lost", "Policy", high="2", zero="FAIL_FAST"),
    Field("sms", "SMs (host devices: threads) of the device to use; 0: the device's default", shape=False,
          high="4294967295"),
    Field("timeout_ms", "of the join; 0: the daemon's timeouts.join_ms, 60 s if not configured", "i32", shape=False,
          high="2147483647"),
    Field("layout", "how received rows lie", "Layout", high="2", zero="COMPACT"),
    Field("scale_format", "of e4m3 rows", "ScaleFormat", high="2", zero="FLOAT32"),
    Field("expert_alignment", "rows, 1..256; 0: 1. {Layout.PACKED}: each expert's first row is a multiple of it. "
          "{Layout.COMPACT}: expert_counts are rounded up to it", low="1", high="kMaxAlignment", zero="1"),
    Field("opaque_bytes", "of a row: a multiple of 16, 16..65536; {Payload.OPAQUE} only", high="kMaxOpaqueBytes",
          multiple="kOpaqueMultiple"),
    Field("num_biases", "bias regions that combine may add, 0..2", high="kMaxBiases"),
    Field("num_handles", "handles that dispatches may keep, 0..4096", high="kMaxHandles"),
    Field("max_recv_rows", "rows of recv_x and y ({Layout.EXPERT}: of each expert's block); 0: the worst case. A "
          "dispatch that needs more fails with RESOURCE_EXHAUSTED on all ranks; with {Span.CLUSTER} on those of the "
          "node, and ranks of other nodes may be taken back to it by the resume", high="kMaxRecvRows"),
    Field("priority", "of this rank's operations on its device, -8..7; higher goes first", "i32", shape=False,
          low="kMinPriority", high="kMaxPriority"),
    Field("sum_ranks", "ranks of a sum domain, 1..R; 0: the daemon's choice, R for a group on one node. Combine adds "
          "up the rows of each sum domain, and rounds the sums of other domains than its own to bf16. CUDA devices "
          "take 0 and R", high="kMaxRanks", allowed="0 .. num_ranks", since="0.2.0"),
    Field("span", "where ranks may be. {Span.CLUSTER}: on any node of the cluster, host devices only", "Span",
          high="1", zero="NODE", since="0.2.0"),
    Field("scale_layout", "of received rows; {Payload.FP8_CAST} and {Payload.FP8}", "ScaleLayout", high="1", zero="ROW_MAJOR",
          since="0.2.0"),
    Field("range_format", "of source_ranges; {Layout.PACKED} and {Layout.EXPERT}", "RangeFormat", high="1", zero="ROWS",
          since="0.2.0"),
    Field("more_formats", "row formats 1, 2, 3, which a dispatch may choose by row_format. All differ. Regions have "
          "room for the largest. Not with {Payload.OPAQUE}", "list", high="kMaxMoreFormats", since="0.2.0"),
    Field("shared_regions", "1: in a slot, y lies where recv_x lies, and out where x does: about half the memory, for "
          "calls that name these rows in memory of the caller's, or write y over recv_x. No operation of a slot may "
          "begin before what the one before it has left there has been read", high="1", since="0.2.0"),
)
BY_ITEM = {"more_formats": ("epd_row_format_t", "RowFormat")}
# proto/shape.h names an enumeration otherwise.
IN_SHAPE = {"Policy": "LossPolicy"}


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def words(field: Field, constant: Callable[[str, str], str], any_rank: str) -> str:
    text = field.text.replace("{ANY_RANK}", any_rank)
    return re.sub(r"\{(\w+)\.(\w+)\}", lambda found: constant(found[1], found[2]), text)


def in_c(field: Field) -> str:
    return words(field, lambda kind, name: f"EPD_{snake(kind).upper()}_{name}", "EPD_ANY_RANK")


def in_python(field: Field) -> str:
    return words(field, lambda kind, name: f"{kind}.{name}", "ANY_RANK")


def comment(indent: str, text: str, begin: str, end: str = "") -> str:
    lines = textwrap.wrap(text, 110 - len(indent) - len(begin) - 1)
    between = f"\n{indent}" + (" * " if end else begin + " ")
    return f"{indent}{begin} " + between.join(lines) + (f" {end}" if end else "")


# ---- numbers of proto/shape.h


def constants() -> dict[str, int]:
    text = (ROOT / "proto/include/proto/shape.h").read_text()
    return {name: int(value, 0) for name, value in re.findall(r"\b(k\w+) =\s+(-?\w+);", text)}


def range_words(field: Field) -> str:
    known = constants()
    number = {name: str(known.get(value, value)) for name, value in field._asdict().items() if isinstance(value, str)}
    low = "0" if field.zero else number["low"]
    every = "" if field.multiple == "1" else f"multiples of {number['multiple']}, "
    return field.allowed or f"{every}{low} .. {number['high']}"


# ---- what is generated


def c_struct() -> str:
    lines = []
    for field in TABLE:
        text = in_c(field) + ("" if field.since == "0.1.0" else f". Since {field.since}")
        if field.kind == "list":
            text += ". Read during the call; NULL: none"
        lines.append(comment("  ", text, "/*", "*/"))
        if field.kind == "list":
            lines += [f"  const {BY_ITEM[field.name][0]}* {field.name};", f"  uint32_t num_{field.name};"]
        else:
            kind = {"u32": "uint32_t", "i32": "int32_t", "text": "const char*"}.get(field.kind)
            lines.append(f"  {kind or f'epd_{snake(field.kind)}_t'} {field.name};")
    return "\n".join(lines)


def cpp_struct() -> str:
    lines = []
    for field in TABLE:
        if field.kind == "list":
            lines.append(f"  std::vector<{BY_ITEM[field.name][0]}> {field.name};")
        elif field.enumeration():
            kind = snake(field.kind)
            lines.append(f"  epd_{kind}_t {field.name} = EPD_{kind.upper()}_{field.zero};")
        else:
            kind = {"u32": "std::uint32_t", "i32": "std::int32_t", "text": "std::string"}[field.kind]
            lines.append(f"  {kind} {field.name}" + ("" if field.kind == "text" else " = 0") + ";")
    return "\n".join(lines)


def cpp_raw() -> str:
    lines = []
    for field in TABLE:
        if field.kind == "list":
            lines += [f"  raw.{field.name} = config.{field.name}.data();",
                      f"  raw.num_{field.name} = static_cast<std::uint32_t>(config.{field.name}.size());"]
        else:
            lines.append(f"  raw.{field.name} = config.{field.name}" + (".c_str()" if field.kind == "text" else "") + ";")
    return "\n".join(lines)


def python_structs() -> str:
    kinds = {"u32": "c_uint32", "i32": "c_int32", "text": "c_char_p"}
    lines = []
    for field in TABLE:
        if field.kind == "list":
            item = BY_ITEM[field.name][1]
            lines += [f'        ("{field.name}", ctypes.POINTER({item})),', f'        ("num_{field.name}", c_uint32),']
        else:
            lines.append(f'        ("{field.name}", {kinds.get(field.kind, "c_enum")}),')
    return "\n".join(lines)


def python_class() -> str:
    width = max(len(field.name) for field in TABLE) + 2
    lines = ["@dataclass(frozen=True)", "class GroupConfig:",
             '    """The shape of a group. All ranks give the same, but for rank, timeout_ms, sms and priority.',
             ""]
    for field in TABLE:
        wrapped = textwrap.wrap(in_python(field), 112 - width)
        lines += [f"    {name:{width}}{part}" for name, part in zip([field.name] + [""] * len(wrapped), wrapped)]
    lines += ['    """', ""]
    for field in TABLE:
        if field.kind == "list":
            lines.append(f"    {field.name}: Sequence[{BY_ITEM[field.name][1]}] = ()")
        elif field.enumeration():
            lines.append(f"    {field.name}: {field.kind} = {field.kind}.{field.zero}")
        else:
            lines.append(f"    {field.name}: " + ('str = ""' if field.kind == "text" else "int = 0"))
    return "\n".join(lines)


def python_ranges() -> str:
    return "\n".join(f'    "{field.name}": "{range_words(field)}",' for field in TABLE
                     if field.kind in ("u32", "i32"))


def shape_fields() -> list[Field]:
    return [field for field in TABLE if field.shape and field.kind != "text"]


def shape_members() -> str:
    lines = []
    for field in shape_fields():
        kind = IN_SHAPE.get(field.kind, field.kind)
        if field.kind == "list":
            lines += [f"  std::uint32_t num_{field.name} = 0;",
                      f"  std::array<RowFormat, {field.high}> {field.name}{{}};"]
        elif field.enumeration():
            lines.append(f"  {kind} {field.name} = {{}};")
        else:
            lines.append(f"  std::uint32_t {field.name} = {field.zero or 0};")
    return "\n".join(lines)


def shape_rules() -> str:
    lines = []
    for field in shape_fields():
        if field.kind == "list":
            lines.append((f"num_{field.name}", f"0, {field.high}, 1"))
            for i in range(constants()[field.high]):
                lines += [(f"{field.name}[{i}].{part}", "0, 2, 1") for part in ("payload", "scale_format")]
        else:
            lines.append((field.name, f"{field.low}, {field.high}, {field.multiple}"))
    return "\n".join(f'    {{"{name}", {word}, {limits}}},' for word, (name, limits) in enumerate(lines))


def read_config(cast: str) -> str:
    lines = []
    for field in shape_fields():
        if field.kind == "list":
            continue
        value = f"c.{field.name}"
        if field.enumeration():
            value = f"{cast}<abi::{IN_SHAPE.get(field.kind, field.kind)}>({value})"
        elif field.zero:
            zero = f"abi::{field.zero}" if field.zero.startswith("k") else field.zero
            value = f"{value} != 0 ? {value} : {zero}"
        lines.append(f"  s.{field.name} = {value};")
    return "\n".join(lines)


def control_message() -> str:
    lines = []
    for number, field in enumerate(shape_fields(), 1):
        kind = IN_SHAPE.get(field.kind, field.kind) if field.enumeration() else "uint32"
        if field.kind == "list":
            kind = f"repeated {BY_ITEM[field.name][1]}"
        if field.name == "max_recv_rows":
            kind = "uint64"
        text = words(field, lambda kind, name: f"{snake(kind).upper()}_{name}", "any rank")
        lines += [comment("  ", text, "//"), f"  {kind} {field.name} = {number};"]
    return "\n".join(lines)


def wire_message() -> str:
    lines = []
    for field in shape_fields():
        number = len(lines) + 1
        if field.kind != "list":
            lines.append(f"  uint32 {field.name} = {number};")
            continue
        lines.append(f"  uint32 num_{field.name} = {number};")
        lines += [f'  {BY_ITEM[field.name][1]} {field.name[:-1]}_{i} = {number + i} [(at) = "{field.name}[{i - 1}]"];'
                  for i in range(1, constants()[field.high] + 1)]
    return "\n".join(lines)


def guide_table() -> str:
    lines = ["| field | what | since |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{field.name}` | {in_c(field)} | {field.since} |" for field in TABLE])


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "client/include/epd/epd.h": {"epd_group_config_t": c_struct},
    "client/include/epd/epd.hpp": {"Config": cpp_struct, "make_config": cpp_raw},
    "client/python/epd/_abi.py": {"GroupConfig": python_structs},
    "client/python/epd/types.py": {"GroupConfig": python_class, "ranges": python_ranges},
    "client/GUIDE.md": {"fields": guide_table},
    "client/src/group.cpp": {"make_shape": lambda: read_config("as")},
    "client/tools/kit/include/kit/config_shape.h": {"shape_of": lambda: read_config("static_cast")},
    "proto/epd/v1/control.proto": {"GroupShape": control_message},
    "proto/epd/v1/membership.proto": {"GroupShape": wire_message},
    "proto/include/proto/shape.h": {"GroupShape": shape_members},
    "proto/include/proto/shape_rules.h": {"kShapeFields": shape_rules},
}


def generated(text: str, parts: dict[str, Callable[[], str]]) -> str:
    for part, make in parts.items():
        begin = re.search(rf".*\[fields\.py: {part}\].*\n", text)
        assert begin, part
        end = re.compile(r".*\[end\].*\n").search(text, begin.end())
        assert end, part
        text = text[: begin.end()] + make() + "\n" + text[end.start() :]
    return text


def main() -> int:
    status = 0
    for name, parts in PARTS.items():
        path = ROOT / name
        old = path.read_text()
        new = generated(old, parts)
        if new == old:
            continue
        if sys.argv[1:] == ["--check"]:
            print(f"{name} differs from proto/fields.py; run it")
            status = 1
        else:
            path.write_text(new)
    return status


if __name__ == "__main__":
    sys.exit(main())
