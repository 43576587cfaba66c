"""The defaults of `install` in its signature, where `help`, IPython and the site look for them."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from rmm_managed_bridge.config.arguments import BridgeConfig, Hints


def signature_with_defaults(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `function`, with what a None among its defaults comes to.

    In the code they are None, which is how an argument that was not given is known: a variable may stand for it.
    """
    meant = {field.name: field.default for field in fields(BridgeConfig)}
    signature = inspect.signature(function)
    return signature.replace(
        parameters=[
            parameter.replace(default=_shown(meant[name])) if parameter.default is None and name in meant else parameter
            for name, parameter in signature.parameters.items()
        ]
    )


def _shown(default: Any) -> Any:
    return str(default) if isinstance(default, Hints) else default
