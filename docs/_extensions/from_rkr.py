"""Directives that show what the package knows of itself: commands with their options, methods, recipes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

MARKUP = re.compile(r"\[/?(?:bold|dim|italic|cyan)\]")


def cell(text: object) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: object) -> str:
    return f"`{cell(text)}`" if str(text) else ""


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


class FromText(SphinxDirective):
    """A directive whose content is Markdown that it makes."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # its text changes with the package, not with the page
        return self.parse_text_to_nodes(self.text(), allow_section_headings=True)

    def text(self) -> str:
        raise NotImplementedError


class Commands(FromText):
    """Every command of `rkr`, from what its own `--help` is made of."""

    def text(self) -> str:
        from rkr.cli import app

        group: Any = typer.main.get_command(app)
        panels: dict[str, list[str]] = {}
        for name, command in group.commands.items():
            if not command.hidden:
                panel = str(getattr(command, "rich_help_panel", None) or "Others")
                panels.setdefault(panel, []).append(self.command(name, command))
        return "\n\n".join("\n\n".join([f"## {panel}", *parts]) for panel, parts in panels.items())

    def command(self, name: str, command: Any) -> str:
        context = command.context_class(command, info_name=f"rkr {name}")
        usage = " ".join(["rkr", name, *command.collect_usage_pieces(context)])
        parts = [f"### rkr {name}", MARKUP.sub("", inspect.cleandoc(command.help or "")), f"```text\n{usage}\n```"]
        arguments, options = [], []
        for parameter in command.params:
            if getattr(parameter, "hidden", False) or parameter.name == "help":
                continue
            row = (", ".join(code(o) for o in (*parameter.opts, *parameter.secondary_opts)), self.default(parameter))
            if parameter.param_type_name == "argument":
                arguments.append(
                    (code(parameter.metavar or parameter.name.upper()), cell(getattr(parameter, "help", "") or ""))
                )
            else:
                options.append((*row, cell(MARKUP.sub("", getattr(parameter, "help", "") or ""))))
        if arguments:
            parts.append(table(("argument", "meaning"), arguments))
        if options:
            parts.append(table(("option", "default", "meaning"), options))
        examples = [
            line for line in MARKUP.sub("", command.epilog or "").splitlines() if line.startswith(("rkr", "torch"))
        ]
        if examples:
            parts.append("```console\n" + "\n".join(f"$ {line}" for line in examples) + "\n```")
        return "\n\n".join(parts)

    @staticmethod
    def default(parameter: Any) -> str:
        found = parameter.default
        if callable(found) or found is None or found is False or found == () or "UNSET" in repr(found):
            return ""
        return code(found)


class Methods(FromText):
    """Every method with its options, from the docstrings that define them."""

    def text(self) -> str:
        from rkr.methods.describe import about, option_texts
        from rkr.registry import IN_WORDS, METHODS

        parts = []
        for setting, methods in METHODS.items():
            parts.append(f"## Methods for {IN_WORDS[setting]}")
            for name in methods:
                method = methods[name]
                rows = [
                    (code(option), code(json.dumps(value, ensure_ascii=False)), cell(text))
                    for option, (value, text) in option_texts(method).items()
                ]
                parts += [f"### {name}", f"{method.summary}.", self.plain(about(method)) if not method.preset else ""]
                if method.preset:
                    given = ", ".join(
                        f"{code(key)} = {code(json.dumps(value))}" for key, value in method.preset.items()
                    )
                    parts.append(f"Options that differ from the class's defaults: {given}.")
                if rows and not method.preset:
                    parts.append(table(("option", "default", "meaning"), rows))
        return "\n\n".join(part for part in parts if part)

    @staticmethod
    def plain(text: str) -> str:
        """The first part of a docstring as Markdown, in which a formula's `_` and `*` are no markup."""
        parts = re.split(r"(`[^`]*`)", text.replace("``", "`").replace("<", "&lt;"))
        return "".join(part if part[:1] == "`" else re.sub(r"[_*]", r"\\\g<0>", part) for part in parts)


class Recipes(FromText):
    """Every recipe of the package, with its title."""

    def text(self) -> str:
        from rkr.cli.listing import everything

        found = everything()
        return table(("recipe", "what it is"), [(code(name), cell(text)) for name, text in found["recipes"].items()])


def replacing(old: str, new: str) -> Callable[..., None]:
    """Napoleon takes what is before a colon in the first line of a property's docstring for its type."""

    def replace(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
        if what in ("attribute", "property"):
            lines[:1] = [line.replace(old, new) for line in lines[:1]]

    return replace


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", replacing(":", "\N{RATIO}"), priority=400)  # Napoleon has 500
    app.connect("autodoc-process-docstring", replacing("\N{RATIO}", ":"), priority=600)
    app.add_directive("rkr-commands", Commands)
    app.add_directive("rkr-methods", Methods)
    app.add_directive("rkr-recipes", Recipes)
    app.connect(
        "html-page-context",
        lambda app, page, template, context, tree: context.update(
            sphinx_version=version("sphinx"), torch_version=version("torch")
        ),
    )
    app.add_css_file("rkr.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
