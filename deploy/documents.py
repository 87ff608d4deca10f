#!/usr/bin/env python3
"""documents.py OUT: the documents as they are installed: OUT/epd for package epd, OUT/python3-epd for that one.

A link leads to where its target is installed. Of a link to anything else its text is left.
"""
import os
import pathlib
import re
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
# Where the package's folder in share/doc has what the sources name so.
EPD = {
    "README.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "LICENSE": "LICENSE",
    "SECURITY.md": "SECURITY.md",
    "deploy/OPERATING.md": "OPERATING.md",
    "kernels/PERFORMANCE.md": "PERFORMANCE.md",
    "proto/GLOSSARY.md": "GLOSSARY.md",
    "client/tools/ctl/README.md": "epctl.md",
    "client/tools/bench/README.md": "epbench.md",
    "client/python/README.md": "python.md",
    "client/deep_ep/README.md": "deep_ep.md",
    "client/examples": "examples",
    "client/python/examples": "examples/python",
    # Pages for users beside the guide, and not the design of the room.
    **{f"client/{page.name}": page.name for page in ROOT.glob("client/*.md") if page.name != "README.md"},
}
PYTHON = {"client/python/README.md": "README.md", "client/python/examples": "examples"}
ELSEWHERE = {"deploy/prometheus/epd.rules.yml": "../../epd/prometheus/epd.rules.yml",
             "deploy/grafana/epd.json": "../../epd/grafana/epd.json"}


def installed(target, places):
    """Where a path of the sources is, or None."""
    for folder in (target, *target.parents):
        if folder.as_posix() in places:
            return pathlib.PurePath(places[folder.as_posix()]) / target.relative_to(folder)
    return None


def rewritten(source, place, places):
    def link(found):
        mark, text, target, anchor = found.groups()
        if not target or re.match(r"[a-z][a-z0-9+.-]*:", target):
            return found.group(0)
        path = pathlib.PurePath(os.path.normpath(source.parent / target))
        there = installed(path, places)
        if there is None:
            return text
        return f"{mark}[{text}]({os.path.relpath(there, place.parent)}{anchor or ''})"

    return LINK.sub(link, (ROOT / source).read_text(encoding="utf-8"))


def write(folder, places, elsewhere):
    for name, place in places.items():
        source, place = pathlib.PurePath(name), pathlib.PurePath(place)
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder / place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.suffix == ".md":
            (folder / place).write_text(rewritten(source, place, {**places, **elsewhere}), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / source, folder / place)


def main():
    out = pathlib.Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    write(out / "epd", EPD, ELSEWHERE)
    write(out / "python3-epd", PYTHON, {})


main()
