"""Tools of a request: what is told to the model's template, what the output is held to, and how calls are found in it.

Templates that know tools get them as they are. For others the functions are described in the system message in the
Hermes format (NousResearch's), as are earlier calls and their results, so that every chat model can be offered tools.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ipc.errors import InvalidRequest
from ipc.messages import Generate
from runtime.call_parser import ToolCallParser
from runtime.tool_calls import FORMATS, detect, grammar

Message = dict[str, Any]
FALLBACK = "hermes"
CHOICES = ("auto", "none", "required")
DESCRIPTION = """You may call one or more functions to assist with the user query.
The functions you may call are these, one JSON object a line:
{functions}
For each call answer with a JSON object with the function's name and arguments between marks:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Toolbox:
    """What one request offers. `lark` forces calls; None lets the model choose."""

    format: str
    tools: list[dict[str, Any]]
    lark: str | None
    most: int | None  # calls that are passed on; None: all

    def parser(self) -> ToolCallParser:
        return FORMATS[self.format].parser()


class Tools:
    """For one chat template. `chosen` is --tool-call-parser."""

    def __init__(self, template: str | None, chosen: str) -> None:
        self.native = template is not None and "tools" in template
        found = detect(template) if self.native and template else None
        self.format = (found or FALLBACK) if chosen == "auto" else chosen

    def box(self, message: Generate) -> Toolbox | None:
        """None where the request has no tools, or wants none called. Raises `InvalidRequest`."""
        functions, choice = _functions(message.tools), message.tool_choice
        if not functions:
            if choice not in ("auto", "none"):
                raise InvalidRequest("tool_choice needs tools", "tool_choice")
            return None
        if message.messages is None:
            raise InvalidRequest("tools need messages", "tools")
        if choice == "none":
            return None
        forced = _forced(functions, choice)
        parallel = message.parallel_tool_calls and not isinstance(choice, dict)
        if forced and message.sampling.structured_outputs is not None:
            raise InvalidRequest("structured_outputs cannot be had beside a tool call that is forced", "tool_choice")
        lark = grammar(self.format, forced, parallel) if forced else None
        return Toolbox(self.format, message.tools, lark, None if parallel else 1)

    def told(self, messages: list[Message], box: Toolbox | None) -> tuple[list[Message], dict[str, Any]]:
        """(messages, variables) as the template wants them."""
        if self.native:
            return [_with_objects(message) for message in messages], {"tools": box.tools} if box else {}
        plain = [_in_words(message) for message in messages]
        return (_described(plain, box.tools) if box else plain), {}


def _functions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The function objects. Raises `InvalidRequest` that names the place."""
    found: list[dict[str, Any]] = []
    for n, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise InvalidRequest(f"tools[{n}] must be of type function", "tools")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name or name in [one["name"] for one in found]:
            raise InvalidRequest(f"tools[{n}].function.name must be a text of its own", "tools")
        if not isinstance(parameters, (dict, type(None))):
            raise InvalidRequest(f"tools[{n}].function.parameters must be a JSON schema", "tools")
        found.append(function)
    return found


def _forced(functions: list[dict[str, Any]], choice: str | dict[str, Any]) -> list[dict[str, Any]]:
    """Those of which one must be called; none for auto. Raises `InvalidRequest`."""
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise InvalidRequest(f"tool_choice must be one of {', '.join(CHOICES)}, or name a function", "tool_choice")
        return functions if choice == "required" else []
    named = choice.get("function")
    name = named.get("name") if choice.get("type") == "function" and isinstance(named, dict) else None
    found = [function for function in functions if function["name"] == name]
    if not found:
        raise InvalidRequest("tool_choice must name a function of tools", "tool_choice")
    return found


def _with_objects(message: Message) -> Message:
    """Earlier calls with their arguments as objects, which is what templates take."""
    calls = _calls(message)
    return message | {"tool_calls": [_object(call) for call in calls]} if calls else message


def _calls(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None):
        raise InvalidRequest("tool_calls of a message must be a list", "messages")
    return calls or []


def _object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("tool_calls of a message must be function calls", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise InvalidRequest("the arguments of a message's tool call are not JSON", "messages") from None
    return call | {"function": function | {"arguments": arguments}}


def _in_words(message: Message) -> Message:
    """Earlier calls and results as the Hermes format writes them."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = _calls(message)
    if not calls:
        return message
    lines = [message["content"]] if message["content"] else []
    for call in map(_object, calls):
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        lines.append(f"<tool_call>\n{as_json(function, 'messages')}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(lines)}


def as_json(value: Any, param: str) -> str:
    """Raises `InvalidRequest` for what JSON cannot hold, such as bytes, which msgpack can."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {error}", param) from None


def _described(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """With the functions in the system message, which is the first."""
    words = DESCRIPTION.format(functions="\n".join(as_json(tool, "tools") for tool in tools))
    first, *rest = messages
    if first["role"] == "system":
        return [first | {"content": f"{first['content']}\n\n{words}"}, *rest]
    return [{"role": "system", "content": words}, *messages]
