#!/usr/bin/env python3
"""documents_test.py BUILD_DIR: installs everything, and follows each link of each installed document.

README.md had 22 links, and OPERATING.md 14, to what was not installed. Exit status: 0 passed, 1 failed.
"""
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy"))
import lint_documents  # noqa: E402

WANTED = {
    "epd": ("README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "OPERATING.md", "GUIDE.md", "epctl.md",
            "examples/minimal.cpp",
            "examples/moe_graph.c", "examples/python/minimal.py"),
    "python3-epd": ("README.md", "examples/minimal.py"),
}


def main():
    with tempfile.TemporaryDirectory(prefix="epd-documents-test-") as directory:
        for component in ("daemon", "client-dev", "python"):
            subprocess.run(["cmake", "--install", sys.argv[1], "--component", component, "--prefix", "/usr"], check=True,
                           stdout=subprocess.DEVNULL, env={**os.environ, "DESTDIR": directory}, timeout=60)
        documents = pathlib.Path(directory, "usr/share/doc")
        found = [f"share/doc/{package}/{name} is not installed" for package, names in WANTED.items() for name in names
                 if not (documents / package / name).is_file()]
        pages = {page.resolve(): lint_documents.Document(page) for page in documents.rglob("*.md")}
        for page, document in list(pages.items()):
            for number, what in lint_documents.check_links(page, document, pages):
                found.append(f"{page.relative_to(documents)}:{number}: {what}")
    print("\n".join(found) or f"{len(pages)} documents: each link leads to something")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
