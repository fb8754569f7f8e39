"""The page and the documentation of the API: each one self-contained HTML file, under a strict policy."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("rkr.serve", "static"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )


def _static(name: str) -> str:
    return files("rkr.serve").joinpath("static", name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def page() -> tuple[str, str]:
    """The page, and its Content-Security-Policy."""
    style, script = _static("page.css"), _static("zip.js") + _static("page.js")
    text = _environment().get_template("page.html.jinja").render(style=style, script=script)
    policy = f"{POLICY}; script-src {_hash(script)}; style-src {_hash(style)}; img-src blob:; connect-src 'self'"
    return text, policy


def documentation(description: Mapping[str, Any]) -> tuple[str, str]:
    """The documentation of the API from its OpenAPI description, and its Content-Security-Policy."""
    return _documentation(json.dumps(description, sort_keys=False))


@cache
def _documentation(text: str) -> tuple[str, str]:
    description, style = json.loads(text), _static("page.css")
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append({"path": path, "method": method.upper(), **operation})
    html = (
        _environment()
        .get_template("docs.html.jinja")
        .render(style=style, info=description["info"], groups=groups, schemas=description["components"]["schemas"])
    )
    return html, f"{POLICY}; style-src {_hash(style)}"
