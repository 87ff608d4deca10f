#!/usr/bin/env python3
"""manual.py BIN_DIR VERSION OUT_DIR: writes epd.8, epctl.1, epbench.1 and epd-moe-demo.1 from --help.

Headings become sections. All else stands as the program prints it.
"""
import os
import pathlib
import re
import subprocess
import sys

PAGES = (
    ("epd", "8", "expert-parallel communication daemon", "epctl(1), epd.toml(5)"),
    ("epctl", "1", "look at and operate a running epd", "epd(8), epd.toml(5)"),
    ("epbench", "1", "measure dispatch and combine through epd", "epd(8), epctl(1)"),
    ("epd-moe-demo", "1", "a forward pass through MoE layers, by epd", "epd(8), epbench(1)"),
)


def roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def help_of(bin_dir, *command):
    # No variable of the caller's may get into a page.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EPD_")}
    done = subprocess.run([bin_dir / command[0], *command[1:], "--help"], env=environment, check=True,
                          capture_output=True, text=True, timeout=60)
    return done.stdout.rstrip().split("\n")


def heading(line):
    """(title, whether a list of CLI11's follows), or None: "Options:" and "[Options]", or "EXIT CODES"."""
    listed = re.fullmatch(r"\[?([A-Z][a-z]+)(?:\]|:)", line)
    if listed:
        return {"Configuration": "CONFIGURATION OPTIONS"}.get(listed.group(1), listed.group(1).upper()), True
    return (line, False) if re.fullmatch(r"[A-Z][A-Z /]+[A-Z]", line) else None


def entries(lines, column):
    """Entries of a list whose texts begin at a column; a long term has its text on the next line."""
    out = []
    for line in lines:
        term, text = line[:column].strip(), line[column:]
        if line[:2] == "  " and line[2:3] != " " and line[column - 1 : column] != " ":
            term, text = line.strip(), ""
        if term:
            out += [".TP", ".B " + roff(term)]
        if text:
            out.append(roff(text))
    return out


def sections(lines):
    """(title, whether it is a list, lines); the first has no title."""
    found = [(None, False, [])]
    for line in lines:
        title = heading(line)
        if title is None:
            found[-1][2].append(line)
        else:
            found.append((*title, []))
    return found


def body(lines):
    column = next(line for line in lines if "Print this help message" in line).index("Print this")
    out = []
    for title, is_list, text in sections(lines):
        while text and not text[-1]:
            text.pop()
        while text and not text[0]:
            text.pop(0)
        if title is not None:
            out.append(".SH " + roff(title))
        out += entries(text, column) if is_list else [".nf", *map(roff, text), ".fi"]
    return out


def commands(bin_dir, program, lines):
    """The help of each command."""
    names = next((text for title, _, text in sections(lines) if title == "SUBCOMMANDS"), [])
    if program == "epd" or not names:
        return []
    out = [".SH EACH COMMAND"]
    for name in (line.split()[0] for line in names if line):
        out += [f".SS {name}", ".nf", *map(roff, help_of(bin_dir, program, name)), ".fi"]
    return out


def page(bin_dir, version, program, section, what, see_also):
    lines = help_of(bin_dir, program)
    stop = next((i for i, line in enumerate(lines) if line == "SEE ALSO"), len(lines))
    usage = [line.removeprefix("Usage: ") for line in lines[:stop] if line.startswith("Usage: ")]
    lines = [line for line in lines[:stop] if not line.startswith("Usage: ")]
    return "\n".join([
        f'.TH {program.upper()} {section} "" "epd {version}" "epd"',
        ".SH NAME", roff(f"{program} - {what}"),
        ".SH SYNOPSIS", ".nf", *map(roff, usage), ".fi",
        ".SH DESCRIPTION", *body(lines), *commands(bin_dir, program, lines),
        ".SH SEE ALSO", roff(see_also), "",
    ])


def main():
    bin_dir, version, out = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    for program, section, what, see_also in PAGES:
        (out / f"{program}.{section}").write_text(page(bin_dir, version, program, section, what, see_also))


main()
