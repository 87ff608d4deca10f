#!/usr/bin/env python3
"""Checks the repository's Markdown documents: lines, links and words. Called by deploy/lint.sh.

Lines      at most 100 columns. Exempt: tables, code fences, and lines whose one long part is a link.
Links      a relative link names a file or folder that exists; an anchor names a heading of that document.
Words      phrases of the table "Old words" in proto/GLOSSARY.md whose last column says `documents`.
           Exempt: the glossary itself, code fences, inline code, link targets.
README.md  at most 150 lines.
Headless   in the folders CLEAN: list items of documents, and comments of sources on lines of their own, that begin
           without a subject ("Of ...", "What ...", "With ...").
Names      at most three sources of one file name; sources of a daemon's room declare nothing in epd itself.
"""
import argparse
import pathlib
import re
import subprocess
import sys

MAX_COLUMNS = 100
MAX_README_LINES = 150
MAX_SAME_NAMES = 3
GLOSSARY = "proto/GLOSSARY.md"

# Folders and files without headless comments and list items. Wanted: everything.
CLEAN = ("daemon/", "kernels/", "proto/", "deploy/", "tests/", "client/", "CONTRIBUTING.md")
HEADS = r"(Of|What|Whatever|Who|Whoever|By|With|To be)\s"
HEADLESS_COMMENT = re.compile(r"\s*(?://[/!]?<?|#+|--|\*|/\*\*?|\"\"\")\s*" + HEADS)
HEADLESS_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+(?:\*\*[^*]*\*\*\s+)?" + HEADS)

LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
INLINE_CODE = re.compile(r"(`+)(?:.*?)\1")


class Document:
    """Lines of a document by what they are. `prose` has the line numbers outside of code fences."""

    def __init__(self, path):
        self.lines = path.read_text(encoding="utf-8").splitlines()
        self.prose = []
        fence = None
        for number, line in enumerate(self.lines, 1):
            mark = re.match(r"\s*(```+|~~~+)", line)
            if fence is None and mark:
                fence = mark.group(1)
            elif fence is not None:
                if mark and mark.group(1).startswith(fence):
                    fence = None
            else:
                self.prose.append(number)

    def anchors(self):
        """Names of headings as GitHub makes them."""
        found = set()
        for number in self.prose:
            heading = re.match(r"#{1,6}\s+(.*?)\s*#*$", self.lines[number - 1])
            if not heading:
                continue
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1)).lower()
            anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            name, again = anchor, 0
            while name in found:
                again += 1
                name = f"{anchor}-{again}"
            found.add(name)
        return found


def table_after(document, heading):
    """Rows of the first table below the heading, as lists of cells."""
    rows, inside = [], False
    for number in document.prose:
        line = document.lines[number - 1]
        if line.startswith("#"):
            inside = line.lstrip("#").strip() == heading
        elif inside and line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]  # without head and rule


def old_words(glossary, where):
    """(pattern, what to write) of each phrase that is looked for in `where`."""
    words = []
    for phrases, instead, checked in table_after(glossary, "Old words"):
        if where not in [part.strip() for part in checked.split(",")]:
            continue
        for phrase in re.findall(r"`([^`]+)`", phrases):
            words.append((phrase, instead))
    return words


def check_lines(document):
    for number in document.prose:
        line = document.lines[number - 1]
        if len(line) <= MAX_COLUMNS or line.lstrip().startswith("|"):
            continue
        longest = max(LINK.findall(line) + line.split(), key=len, default="")
        if LINK.search(line) and len(line) - len(longest) <= MAX_COLUMNS // 2:
            continue
        yield number, f"has {len(line)} columns; allowed: {MAX_COLUMNS}"


def check_links(path, document, documents):
    for number in document.prose:
        line = INLINE_CODE.sub(lambda code: " " * len(code.group(0)), document.lines[number - 1])
        for target in LINK.findall(line):
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path.resolve()
            if not file.exists():
                yield number, f"links to {target}: there is no {name}"
            elif anchor and file.suffix == ".md":
                if file not in documents:
                    documents[file] = Document(file)
                if anchor not in documents[file].anchors():
                    yield number, f"links to {target}: there is no such heading"


def check_words(document, words):
    # A phrase may lie across lines, so the prose is searched as one text; line numbers are kept beside it.
    text, starts = "", []
    for number in document.prose:
        line = INLINE_CODE.sub(lambda code: "\x00" * len(code.group(0)), document.lines[number - 1])
        line = LINK.sub(lambda link: link.group(0).replace(link.group(1), ""), line)
        starts.append((len(text), number))
        text += re.sub(r"[*_]", "", line).strip() + "\n"
    for phrase, instead in words:
        pattern = r"(?<![\w-])" + r"\s+".join(re.escape(word) for word in phrase.split()) + r"(?![\w-])"
        for match in re.finditer(pattern, text):
            number = [line for start, line in starts if start <= match.start()][-1]
            yield number, f"says '{phrase}'; the glossary says: {instead}"


CODE = ("*.c", "*.cpp", "*.h", "*.hpp", "*.cu", "*.cuh", "*.proto", "*.pml")
SCRIPTS = ("*.py", "*.sh", "*.cmake", "*CMakeLists.txt", "*.in", "*.toml", "*.conf", "*.yml", "*.yaml")


def check_heads(name, pattern, lines):
    """Begins of comments or list items; `lines`: (number, line) of each that may be one."""
    if not name.startswith(CLEAN):
        return
    for number, line in lines:
        head = pattern.match(line)
        if head:
            yield number, f"begins with '{head.group(1)}'; allowed: a subject and its verb (CONTRIBUTING.md)"


def check_code(path, words):
    """Old words in comments, texts and names: a name's parts between underscores count as words."""
    lines = path.read_text(errors="replace").split("\n")
    patterns = [(phrase, instead, re.compile(r"(?<![A-Za-z-])" + re.escape(phrase) + r"(?![A-Za-z-])", re.IGNORECASE))
                for phrase, instead in words]
    for number, line in enumerate(lines, 1):
        for phrase, instead, pattern in patterns:
            if pattern.search(line):
                yield number, f"says '{phrase}'; the glossary says: {instead}"


def check_names(names):
    by_name = {}
    for name in names:
        by_name.setdefault(pathlib.PurePath(name).name, []).append(name)
    for same in by_name.values():
        if len(same) > MAX_SAME_NAMES:
            yield same[0], 1, f"has the file name of {len(same)} sources; allowed: {MAX_SAME_NAMES}"


def check_namespace(name, path):
    """Rooms of the daemon have namespaces of their own; base and common are the foundation."""
    if not re.match(r"daemon/(?!base/)\w+/.*\.(h|cpp)$", name):
        return
    for number, line in enumerate(path.read_text(errors="replace").split("\n"), 1):
        if line.startswith("namespace epd {"):
            yield number, "declares in epd itself; allowed: the namespace of its room"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    parser.add_argument("files", nargs="*", help="relative to the root; default: all that git knows")
    arguments = parser.parse_args()
    root = arguments.root
    names = arguments.files or subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=root, check=True, capture_output=True, text=True).stdout.split("\n")
    names = [name for name in names if name and (root / name).exists()]
    words = old_words(Document(root / GLOSSARY), "documents")
    if not names or not words:
        sys.exit(f"error: {root} has no documents, or {GLOSSARY} has no old words")
    documents, findings = {}, 0
    for name in names:
        path = root / name
        document = documents.setdefault(path.resolve(), Document(path))
        found = list(check_links(path, document, documents))
        found += check_lines(document)
        if name == "README.md" and len(document.lines) > MAX_README_LINES:
            found.append((MAX_README_LINES + 1, f"has {len(document.lines)} lines; allowed: {MAX_README_LINES}"))
        found += check_heads(name, HEADLESS_ITEM, [(number, document.lines[number - 1]) for number in document.prose])
        if name != GLOSSARY:
            found += check_words(document, words)
        for number, text in sorted(found):
            print(f"{name}:{number}: {text}")
        findings += len(found)
    if not arguments.files:
        def known(patterns):
            listed = subprocess.run(["git", "ls-files", *patterns], cwd=root, check=True, capture_output=True, text=True)
            return [name for name in listed.stdout.split() if (root / name).is_file()]

        code_words = old_words(Document(root / GLOSSARY), "code")
        sources = known(CODE)
        for name, number, text in check_names(sources):
            print(f"{name}:{number}: {text}")
            findings += 1
        for name in sources:
            found = [*check_code(root / name, code_words), *check_namespace(name, root / name)]
            for number, text in found:
                print(f"{name}:{number}: {text}")
            findings += len(found)
        for name in sources + known(SCRIPTS):
            lines = enumerate((root / name).read_text(errors="replace").split("\n"), 1)
            for number, text in check_heads(name, HEADLESS_COMMENT, lines):
                print(f"{name}:{number}: {text}")
                findings += 1
    if findings:
        print(f"{findings} findings in documents and sources")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
