#!/usr/bin/env python3
"""structs.py structs|fields PROTO: C++ for the messages of membership.proto, on the standard output

structs    the plain structs with which daemon/membership works
fields     fields(io, struct), which shows `io` the number, the name and the limits of each field (daemon/cluster/wire.h)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

# For each kind of number: its type in C++, the lowest and the highest one.
NUMBERS = {
    "uint32": ("std::uint32_t", "0", "kAnyWord"), "uint64": ("std::uint64_t", "0", "kAny"),
    "fixed64": ("std::uint64_t", "0", "kAny"), "int32": ("std::int32_t", "kLeastInt", "kMostInt"),
    "sint32": ("std::int32_t", "kLeastInt", "kMostInt"), "bool": ("bool", "0", "1"),
}
OPTION = r'\((\w+)\) = (?:"([^"]*)"|true)'
FIELD = re.compile(r"(repeated )?(\w+) (\w+) = (\d+)(?: \[(.*)\])?;")
MESSAGE = re.compile(r"^message (\w+) \{(\}|.*?^\})", re.M | re.S)
ONEOF = re.compile(r"oneof (\w+) \{(.*?)\}", re.S)


class Field(NamedTuple):
    repeated: bool
    kind: str
    name: str
    number: str
    options: dict[str, str]

    def is_plain(self) -> bool:
        return self.kind in NUMBERS or self.kind in ("string", "bytes")


class Message(NamedTuple):
    name: str
    options: dict[str, str]
    fields: list[Field]
    oneof: str  # its name; "": there is none
    choices: list[Field]

    def is_elsewhere(self, field: Field) -> bool:
        """Whether the field is one of the member `message`."""
        return "message" in self.options and field.is_plain()


def fields_in(text: str) -> list[Field]:
    return [Field(repeated != "", kind, name, number, dict(re.findall(OPTION, options)))
            for repeated, kind, name, number, options in FIELD.findall(text)]


def read(text: str) -> list[Message]:
    messages = []
    for name, body in MESSAGE.findall(re.sub(r" *//.*", "", text)):
        oneof = ONEOF.search(body)
        messages.append(Message(name, dict(re.findall("option " + OPTION, body)), fields_in(ONEOF.sub("", body)),
                                oneof[1] if oneof else "", fields_in(oneof[2]) if oneof else []))
    return messages


def struct(message: Message, types: dict[str, str]) -> str:
    choices = ", ".join([*filter(None, [message.options.get("also")]), *(choice.kind for choice in message.choices)])
    if message.oneof and not message.fields:
        return f"using {message.name} = std::variant<{choices}>;"
    members = []
    for field in message.fields:
        kind = field.options.get("cpp", types[field.kind])
        member = f"{f'std::vector<{kind}>' if field.repeated else kind} {field.name}"
        if message.is_elsewhere(field):
            member = f"{message.options['message']} message"
        if member not in members:
            members.append(member)
    if message.oneof:
        members.append(f"std::variant<{choices}> {message.oneof}")
    return "\n".join([f"struct {message.name} {{", *(f"  {member} = {{}};" for member in members), "};"])


def show(message: Message, field: Field) -> str:
    options = field.options
    value = f"v.{'message.' * message.is_elsewhere(field)}{options.get('at', field.name)}"
    what = f'{field.number}, "{field.name}", {value}'
    if field.kind in NUMBERS:
        _, low, most = NUMBERS[field.kind]
        kind = f"Kind::k{field.kind.capitalize()}"
        if field.repeated:
            return f"io.template numbers<{kind}>({what}, {options['most']}, {options.get('most_each', most)});"
        return f"io.template number<{kind}>({what}, {options.get('low', low)}, {options.get('most', most)});"
    if field.repeated:
        return f"io.list({what}, {options['most']});"
    if field.is_plain():
        return f"io.{'text' if field.kind == 'string' else 'bytes'}({what}, {options.get('most', 'kMaxWireText')});"
    return f"io.part({what});"


def fields(message: Message, types: dict[str, str]) -> str:
    lines = [show(message, field) for field in message.fields]
    variant = f"v.{message.oneof}" if message.fields else "v"
    lines += [f'io.template choice<{choice.kind}>({choice.number}, "{choice.name}", {variant});'
              for choice in message.choices]
    if message.oneof:
        lines.append(f'io.chosen("{message.oneof}", "{message.options["known"]}");')
    if "checked" in message.options:
        lines.append("io.judge(v);")
    names = "Io& io", f"{types[message.name]}& v"
    begin = "void fields(" + (", ".join(names) if lines else "Io&, " + names[1][:-2]) + ") {"
    return "\n".join(["template <typename Io>", begin, *(f"  {line}" for line in lines), "}"])


def main() -> int:
    messages = read(Path(sys.argv[2]).read_text())
    types = {kind: number[0] for kind, number in NUMBERS.items()} | {"string": "std::string", "bytes": "std::string"}
    types |= {message.name: message.options.get("is", message.name) for message in messages}
    if sys.argv[1] == "structs":
        made = [struct(message, types) for message in messages if "is" not in message.options]
    else:
        made = [fields(message, types) for message in messages if "by_hand" not in message.options]
    print("// Made from membership.proto by structs.py.\n" + "\n".join(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
