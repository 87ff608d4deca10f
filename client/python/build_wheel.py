"""Writes the wheels. epd: client/python/epd and libepd. deep_ep: client/deep_ep, with the module
deep_ep_cpp. Called by deploy/wheel.sh.

Needs the standard library and readelf. The same inputs give the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import pathlib
import platform
import re
import subprocess
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve().parent

# On every Linux system with glibc, and looked for there.
ALLOWED = re.compile(r"libstdc\+\+\.so\.6|libgcc_s\.so\.1|libm\.so\.6|libc\.so\.6|ld-linux-[\w-]+\.so\.[12]")

# The oldest glibc beside which mainstream distributions ship a libstdc++ with these symbols (PEP 600).
GLIBC_OF_GLIBCXX = {
    (3, 4, 25): (2, 28),
    (3, 4, 28): (2, 31),
    (3, 4, 29): (2, 34),
    (3, 4, 30): (2, 35),
    (3, 4, 33): (2, 39),
}

METADATA = """\
Metadata-Version: 2.1
Name: epd
Version: {version}
Summary: Expert-parallel dispatch and combine through the epd daemon
License: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.9
Classifier: Operating System :: POSIX :: Linux
Classifier: Typing :: Typed
Provides-Extra: numpy
Requires-Dist: numpy; extra == "numpy"
Provides-Extra: torch
Requires-Dist: torch; extra == "torch"
Description-Content-Type: text/markdown

{readme}"""

DEEP_EP_METADATA = """\
Metadata-Version: 2.1
Name: deep_ep
Version: {version}
Summary: The interface of DeepEP over the epd daemon
License: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.9
Classifier: Operating System :: POSIX :: Linux
Classifier: Typing :: Typed
Requires-Dist: epd=={epd}
Requires-Dist: torch
Description-Content-Type: text/markdown

{readme}"""

WHEEL = """\
Wheel-Version: 1.0
Generator: epd
Root-Is-Purelib: {pure}
Tag: {tag}
"""


def readelf(option: str, library: pathlib.Path) -> str:
    command = ["readelf", option, "--wide", str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def newest(versions: str, prefix: str) -> tuple[int, ...]:
    """The newest symbol version of a library that is asked for."""
    found = re.findall(rf"Name: {prefix}_([\d.]+)", versions)
    return max((tuple(int(part) for part in text.split(".")) for text in found), default=(0,))


def platform_tag(library: pathlib.Path) -> str:
    """manylinux_2_N for the oldest glibc that the library runs with; linux where that is not known."""
    for needed in re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic", library)):
        if not ALLOWED.fullmatch(needed):
            sys.exit(f"error: libepd needs {needed}; allowed: the C and C++ libraries")
    versions = readelf("--version-info", library)
    machine = platform.machine()
    glibcxx = newest(versions, "GLIBCXX")
    beside = [glibc for known, glibc in GLIBC_OF_GLIBCXX.items() if known >= glibcxx]
    if not beside:
        return f"linux_{machine}"
    glibc = max(newest(versions, "GLIBC"), min(beside))
    return f"manylinux_{glibc[0]}_{glibc[1]}_{machine}"


def modules(package: pathlib.Path) -> dict[str, bytes]:
    """The files of a package, as the wheel names them."""
    return {
        path.relative_to(package.parent).as_posix(): path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and (path.suffix == ".py" or path.name == "py.typed")
    }


def contents(library: pathlib.Path) -> dict[str, bytes]:
    files = modules(HERE / "epd")
    files["epd/libepd.so.1"] = library.read_bytes()
    return files


def record(files: dict[str, bytes], own: str) -> bytes:
    def line(name: str, data: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(data)}\n"

    return ("".join(line(name, data) for name, data in files.items()) + f"{own},,\n").encode()


def add_commit(files: dict[str, bytes], name: str, build: str) -> None:
    """A build between releases, "0.1.0+g229aa93f1c2d", has wheels of its own version: 1.2.1+epd.0.1.0.g229aa93f1c2d."""
    version = version_of(name, files)
    _, plus, commit = build.partition("+")
    told = f"{version}{'.' if '+' in version else plus}{commit}" if commit else version
    path = f"{name}/__init__.py"
    files[path] = files[path].replace(f'__version__ = "{version}"'.encode(), f'__version__ = "{told}"'.encode())


def version_of(name: str, files: dict[str, bytes]) -> str:
    found = re.search(rb'__version__ = "([\d.+a-z]+)"', files[f"{name}/__init__.py"])
    assert found is not None
    return found[1].decode()


def write(
    folder: pathlib.Path, name: str, files: dict[str, bytes], tag: str, metadata: str, readme: pathlib.Path, build: str
) -> None:
    """A wheel of the files. The version is that of the package, and of the build."""
    add_commit(files, name, build)
    version = version_of(name, files)
    info = f"{name}-{version}.dist-info"
    files[f"{info}/METADATA"] = metadata.format(version=version, epd=build, readme=readme.read_text()).encode()
    files[f"{info}/LICENSE"] = (HERE.parents[1] / "LICENSE").read_bytes()
    pure = str(tag.endswith("-any")).lower()
    files[f"{info}/WHEEL"] = WHEEL.format(tag=tag, pure=pure).encode()
    files[f"{info}/RECORD"] = record(files, f"{info}/RECORD")
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path)  # of 1980
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if path.endswith(".so.0") else 0o644) << 16
            archive.writestr(entry, data)
    print(f"{wheel}: {-(-wheel.stat().st_size // 1024)} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the wheels.")
    parser.add_argument("--library", type=pathlib.Path, required=True, help="libepd, stripped")
    parser.add_argument("--version", required=True, help="of the build: 0.1.0+g229aa93f1c2d")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the folder to write to")
    options = parser.parse_args()
    tag = f"py3-none-{platform_tag(options.library)}"
    write(options.output, "epd", contents(options.library), tag, METADATA, HERE / "README.md", options.version)
    drop_in = HERE.parent / "deep_ep"
    files = modules(drop_in / "deep_ep")
    files["deep_ep_cpp.py"] = (drop_in / "deep_ep_cpp.py").read_bytes()
    write(options.output, "deep_ep", files, "py3-none-any", DEEP_EP_METADATA, drop_in / "README.md", options.version)


if __name__ == "__main__":
    main()
