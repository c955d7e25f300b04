"""The effort to reason and the budget for reasoning that requests ask for. Independent of the wire."""

from typing import Any

from penstock.frontend.errors import digits, invalid
from penstock.frontend.served import ServedModel

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def reasoning_variables(effort: str | None, param: str = "reasoning_effort") -> dict[str, Any]:
    """Returns the template's variables for an effort to reason. Raises APIError 400 for an unknown one."""
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise invalid(f"{param} is {effort[:40]!r}; it must be one of {', '.join(_EFFORTS)}", param)
    if effort == "none":  # templates that can leave reasoning out read the first name or the second
        return {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}
    return {"reasoning_effort": effort}


def thinking_variables(effort: str | None, param: str) -> dict[str, Any]:
    """The same for a request that asks for reasoning, with an effort or without."""
    return {"enable_thinking": True, "thinking": True} | reasoning_variables(effort, param)


def check_budget(given: int | None, param: str, model: ServedModel) -> int | None:
    """Returns how many tokens of an answer may be reasoning; None: as the server allows. Raises APIError 400 that names
    the parameter. -1 means no budget."""
    if given is None or given == -1:
        return None
    if given < 0:
        raise invalid(f"{param} is {digits(given)}; it must be 0 or more, or -1 for the server's own", param)
    if model.chat_format.reasoning is None:
        raise invalid(
            f"{param} is not supported: this model has no known form of reasoning; leave it out, or start the server "
            "with --reasoning-format think",
            param,
            "unsupported_parameter",
        )
    most = 2**31 - 1 if model.thinking_budget is None else model.thinking_budget
    if given > most:
        raise invalid(f"{param} is {digits(given)}; this server's limit is {most}: lower it", param)
    return given
