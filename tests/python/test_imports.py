"""The packages' modules import each other in no circle, types included."""

from __future__ import annotations

import ast
import graphlib
import pathlib
from typing import Iterator

import pytest
from conftest import ROOT

PACKAGES = [ROOT / "client/python/epd", ROOT / "client/deep_ep/deep_ep"]
OPTIONAL = "epd.torch"  # needs torch, so functions may import it


class Module:
    def __init__(self, package: pathlib.Path, path: pathlib.Path) -> None:
        parts = list(path.relative_to(package.parent).with_suffix("").parts)
        self.package = parts[:-1]
        self.name = ".".join(self.package if parts[-1] == "__init__" else parts)
        self.tree = ast.parse(path.read_text())

    def imports(self, inside: bool) -> Iterator[str]:
        """Names of modules, or of what they hold: by imports inside functions, or by all others."""
        functions = (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef))
        nodes_inside = {node for function in functions for node in ast.walk(function)}
        for node in ast.walk(self.tree):
            if (node in nodes_inside) != inside:
                continue
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = self.package[: len(self.package) - node.level + 1] if node.level else []
                yield from (".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names)


def modules(package: pathlib.Path) -> list[Module]:
    return [Module(package, path) for path in sorted(package.rglob("*.py"))]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_modules_import_each_other_in_no_circle(package: pathlib.Path) -> None:
    found = modules(package)
    names = {module.name for module in found}
    graph: dict[str, set[str]] = {}
    for module in found:
        imported = {name if name in names else name.rpartition(".")[0] for name in module.imports(inside=False)}
        graph[module.name] = imported & names
    assert len(graph[package.name]) > 2  # it has found the imports
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("imports in a circle: " + " -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_functions_import_only_what_is_optional(package: pathlib.Path) -> None:
    """Else a circle could hide there."""
    own = {
        f"{module.name}: {name}"
        for module in modules(package)
        for name in module.imports(inside=True)
        if name.split(".")[0] == package.name and not f"{name}.".startswith(f"{OPTIONAL}.")
    }
    assert not own
