"""The wheel as a user meets it: built, installed in a clean virtual environment, used."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import BUILD, ROOT, Daemon

TOOLS = ("readelf", "strip", "patchelf")


def clean_environment(**more: str) -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("EPD_LIBRARY", "PYTHONPATH", "EPD_SOCKET")
    }
    return {**kept, **more}


def run(*command: str, seconds: float = 170, **more: str) -> subprocess.CompletedProcess[str]:
    """Outside of the checkout."""
    environment = clean_environment(**more)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, cwd="/")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    for tool in TOOLS:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run(str(ROOT / "deploy/wheel.sh"), "--build-dir", str(BUILD), "--output", str(folder), PATH=path)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("epd-*.whl")
    return made


@pytest.fixture(scope="module")
def drop_in(wheel: pathlib.Path) -> pathlib.Path:
    (made,) = wheel.parent.glob("deep_ep-*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A virtual environment with the wheel and nothing else."""
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        pytest.skip("python3-venv is not installed")
    folder = tmp_path_factory.mktemp("venv")
    made = run(sys.executable, "-m", "venv", str(folder))
    assert made.returncode == 0, made.stderr
    program = str(folder / "bin/python")
    done = run(program, "-m", "pip", "install", "--no-index", "--disable-pip-version-check", str(wheel))
    assert done.returncode == 0, done.stderr
    return program


def test_what_is_in_it(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
    assert {"epd/__init__.py", "epd/py.typed", "epd/libepd.so.1"} <= names
    assert not [name for name in names if "__pycache__" in name or "test" in name]
    assert wheel.stat().st_size < 1_000_000


def test_it_is_for_ubuntu_22_04_and_rhel_9(wheel: pathlib.Path) -> None:
    """It needed a C++ runtime that RHEL 9 does not have."""
    assert "-py3-none-manylinux_2_34_" in wheel.name


def test_what_is_in_the_drop_in(drop_in: pathlib.Path, wheel: pathlib.Path) -> None:
    """It needs the epd that was built with it: it uses more than epd's documented interface."""
    with zipfile.ZipFile(drop_in) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()
    assert {"deep_ep/__init__.py", "deep_ep/py.typed", "deep_ep/utils/math.py", "deep_ep_cpp.py"} <= names
    assert not [name for name in names if name.startswith("epd/") or name.endswith(".so.0")]
    version = wheel.name.split("-")[1]
    assert f"Requires-Dist: epd=={version}\nRequires-Dist: torch\n" in text
    assert drop_in.name.endswith("-py3-none-any.whl")


def test_the_drop_in_is_installed_by_itself_only(drop_in: pathlib.Path, python: str) -> None:
    """And it takes the place of DeepEP's package: pip knows it by that name."""
    assert run(python, "-c", "import deep_ep").returncode != 0
    options = ("--no-index", "--no-deps", "--disable-pip-version-check")
    done = run(python, "-m", "pip", "install", *options, str(drop_in))
    assert done.returncode == 0, done.stderr
    assert run(python, "-m", "pip", "show", "deep_ep").stdout.startswith("Name: deep_ep\nVersion: 1.2.1+epd.")
    done = run(python, "-c", "import deep_ep")
    assert "No module named 'torch'" in done.stderr
    assert run(python, "-m", "pip", "uninstall", "--yes", "deep_ep").returncode == 0


def test_the_minimal_example_runs(daemon: Daemon, python: str) -> None:
    program = str(ROOT / "client/python/examples/minimal.py")
    done = run(python, "-W", "error", program, EPD_SOCKET=daemon.socket)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "received 8 rows, out begins with 0x3f80\n"


def test_the_library_is_the_wheels(python: str) -> None:
    done = run(python, "-c", "import epd; print(epd.library_path, epd.version())")
    assert "site-packages/epd/libepd.so.1" in done.stdout, done.stderr
    done = run(python, "-c", "import epd", EPD_LIBRARY="/nonexistent.so")
    assert done.returncode != 0 and "libepd is not found" in done.stderr and "EPD_LIBRARY" in done.stderr


def test_without_numpy_the_rest_works(daemon: Daemon, python: str) -> None:
    code = "import epd, sys; print(epd.attach(sys.argv[1]).info.daemon, 'numpy' in sys.modules)"
    assert run(python, "-c", code, daemon.socket).stdout.endswith(" False\n")
