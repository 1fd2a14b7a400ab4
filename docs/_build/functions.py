"""Griffe, which reads the source, is shown the functions that are made while the package is imported.

``entropy = function_of(Entropy, ...)`` is a variable for who reads the source: its signature and docstring come from
the class.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class MadeFunctions(griffe.Extension):
    """Put a function in the place of each variable that `function_of` makes."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, agent: Any, **kwargs: Any) -> None:
        if not str(attr.value).startswith("function_of("):
            return
        made = getattr(importlib.import_module(attr.module.path), attr.name)
        signature = inspect.signature(made)
        parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    parameter.name,
                    annotation=parameter.annotation,
                    kind=griffe.ParameterKind.positional_or_keyword,
                    default=None if parameter.default is parameter.empty else repr(parameter.default),
                )
                for parameter in signature.parameters.values()
            )
        )
        docstring = griffe.Docstring(
            made.__doc__, lineno=attr.lineno, parser=agent.docstring_parser, parser_options=agent.docstring_options
        )
        function = griffe.Function(
            attr.name,
            lineno=attr.lineno,
            endlineno=attr.endlineno,
            parameters=parameters,
            returns=signature.return_annotation,
            docstring=docstring,
        )
        attr.parent.set_member(attr.name, function)
