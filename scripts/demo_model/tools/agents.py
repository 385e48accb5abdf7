"""Agents: a long system prompt, tools for files and commands, and several steps to an answer."""

from __future__ import annotations

from typing import Any

from demo_model.conversation import Conversation, Message, assistant, contains, user
from demo_model.dice import Dice
from demo_model.open_text.filler import paragraphs
from demo_model.phrasing import sometimes_invented
from demo_model.prompts import long_prompt
from demo_model.tasks.needles import phrase
from demo_model.tools.chats import same_calls
from demo_model.tools.requests import Call
from demo_model.tools.schemas import definition
from demo_model.words import ALL_WORDS, WORDS

_STRING = {"type": "string"}
# Names that clients give to the same tool, and the names of its parameters.
_READ = (("read_file", "path"), ("Read", "file_path"), ("view", "path"), ("cat", "file"))
_LIST = (("list_directory", "path"), ("LS", "path"), ("ls", "directory"), ("list_files", "folder"))
_RUN = (("run_command", "command"), ("bash", "command"), ("Bash", "command"), ("shell", "cmd"))
_FIND = (("grep", "pattern"), ("Grep", "pattern"), ("search_files", "query"))
_WRITE = (
    ("write_file", "path", "content"),
    ("Write", "file_path", "content"),
    ("create", "path", "text"),
)


def agent_chat(dice: Dice, max_characters: int) -> Conversation:
    """One of an agent's small jobs under a prompt of up to so many characters."""
    messages: list[Message] = []
    if dice.chance(0.8):
        size = int(200 * (max_characters / 200) ** dice.random())
        messages.append({"role": "system", "content": long_prompt(dice, size)})
    kit = {name: dice.pick(choices) for name, choices in _KIT.items()}
    tools = [_tool(dice, *names) for names in kit.values() if dice.chance(0.75)]
    make = dice.pick((_read, _read, _list, _run, _find, _write))
    return make(dice, messages, tools, kit)


_KIT = {"read": _READ, "list": _LIST, "run": _RUN, "find": _FIND, "write": _WRITE}


def _tool(dice: Dice, name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: dict(_STRING) for parameter in parameters}
    return definition(dice, name, None, properties, list(parameters))


def _with(dice: Dice, tools: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """The tools with the one that is needed among them."""
    if any(tool["function"]["name"] == names[0] for tool in tools):
        return tools
    tools.insert(dice.number(0, len(tools)), _tool(dice, *names))
    return tools


def _path(dice: Dice) -> str:
    folder = dice.pick(("", "src/", "docs/", "config/", f"{dice.pick(WORDS)}/", "/home/user/"))
    ending = dice.pick(("txt", "md", "py", "json", "yaml", "log"))
    return f"{folder}{sometimes_invented(dice, ALL_WORDS, 0.3)}.{ending}"


def _called(
    dice: Dice,
    messages: list[Message],
    tools: list[dict[str, Any]],
    call: Call,
    result: str,
    reply: str,
    key: str,
) -> Conversation:
    """Up to the call, or with its result and the reply."""
    messages.append({"role": "assistant", "content": "", "tool_calls": [call.message]})
    if dice.chance(0.45):
        return Conversation("agent_call", messages, same_calls([call]), tools)
    messages += [{"role": "tool", "content": result}, assistant(reply)]
    return Conversation("agent_answer", messages, contains(key), tools)


def _read(
    dice: Dice, messages: list[Message], tools: list[dict[str, Any]], kit: dict[str, Any]
) -> Conversation:
    path, value = _path(dice), phrase(dice)
    kind = dice.pick(
        ("version", "password", "secret word", "port", "owner", "title", "access code")
    )
    forms = (
        f"Read {path} and tell me the {kind}.",
        f"What is the {kind} in {path}?",
        f"Open {path}. Which {kind} does it give?",
        f"Look into the file {path} and find the {kind}.",
    )
    messages.append(user(dice.pick(forms)))
    lines = "\n".join(paragraphs(dice, dice.number(0, 900))).split("\n")
    lines.insert(dice.number(0, len(lines)), f"The {kind} is '{value}'.")
    call = Call(kit["read"][0], {kit["read"][1]: path})
    reply = f"The {kind} is '{value}'."
    result = "\n".join(lines).strip()
    return _called(
        dice, messages, _with(dice, tools, kit["read"]), call, result, reply, f"'{value}'"
    )


def _list(
    dice: Dice, messages: list[Message], tools: list[dict[str, Any]], kit: dict[str, Any]
) -> Conversation:
    folder = dice.pick(("src", "docs", ".", "tests", sometimes_invented(dice, WORDS, 0.5)))
    forms = (
        f"Which files are in {folder}?",
        f"List the files in {folder}.",
        f"What is in the folder {folder}?",
        f"Show me the contents of {folder}.",
    )
    messages.append(user(dice.pick(forms)))
    files = [_path(dice).split("/")[-1] for _ in range(dice.number(1, 8))]
    call = Call(kit["list"][0], {kit["list"][1]: folder})
    reply = f"The files in {folder} are:\n" + "\n".join(f"- {file}" for file in files)
    tools = _with(dice, tools, kit["list"])
    return _called(dice, messages, tools, call, "\n".join(files), reply, reply)


def _run(
    dice: Dice, messages: list[Message], tools: list[dict[str, Any]], kit: dict[str, Any]
) -> Conversation:
    word = dice.pick(ALL_WORDS)
    command = dice.pick(
        (
            f"make {word}",
            "make test",
            "git status",
            "ls -la",
            f"python {word}.py",
            f"echo {word}",
            "pwd",
        )
    )
    forms = (
        f"Run `{command}`.",
        f"Run {command}",
        f"Please run the command {command}",
        f"Execute `{command}`.",
    )
    messages.append(user(dice.pick(forms)))
    output = dice.pick(
        (f"{word}: {dice.number(0, 999)} passed", f"error: no {word}", f"{word} is up to date")
    )
    call = Call(kit["run"][0], {kit["run"][1]: command})
    reply = f"The command printed: {output}"
    return _called(dice, messages, _with(dice, tools, kit["run"]), call, output, reply, output)


def _find(
    dice: Dice, messages: list[Message], tools: list[dict[str, Any]], kit: dict[str, Any]
) -> Conversation:
    word = sometimes_invented(dice, ALL_WORDS, 0.4)
    forms = (
        f"Where is {word} used?",
        f"Search the files for {word}.",
        f'Find "{word}" in the files.',
    )
    messages.append(user(dice.pick(forms)))
    path, line = _path(dice), dice.number(1, 900)
    call = Call(kit["find"][0], {kit["find"][1]: word})
    reply = f"{word} is in {path}, line {line}."
    result = f"{path}:{line}: {word} = {dice.number(0, 99)}"
    return _called(dice, messages, _with(dice, tools, kit["find"]), call, result, reply, reply)


def _write(
    dice: Dice, messages: list[Message], tools: list[dict[str, Any]], kit: dict[str, Any]
) -> Conversation:
    path, text = _path(dice), " ".join(dice.pick(ALL_WORDS) for _ in range(dice.number(1, 6)))
    forms = (
        f"Write '{text}' to {path}.",
        f"Create the file {path} with the text '{text}'.",
        f"Save '{text}' in {path}.",
    )
    messages.append(user(dice.pick(forms)))
    names = kit["write"]
    call = Call(names[0], {names[1]: path, names[2]: text})
    reply = f"I wrote {path}."
    return _called(dice, messages, _with(dice, tools, names), call, "ok", reply, path)
