"""Prints the five longest functions and files, so that growth is seen."""

from __future__ import annotations

import ast
from pathlib import Path

files = [path for house in ("runtime", "proc", "ipc", "bench") for path in Path(house).rglob("*.py")]
functions = [
    (node.end_lineno - node.lineno + 1, f"{path}:{node.name}")
    for path in files
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
]
lengths = [(len(path.read_text().splitlines()), str(path)) for path in files]
for title, rows in (("functions", functions), ("files", lengths)):
    print(f"longest {title}: " + ", ".join(f"{name} {count}" for count, name in sorted(rows, reverse=True)[:5]))
