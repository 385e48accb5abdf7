"""The conversation: reads lines, sends requests, and executes commands."""

import argparse
import base64
import json
import mimetypes
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from mlx_mtp.bench.answer import TimedRead, delta_texts, parse_answer, timed_events
from mlx_mtp.bench.client import error_text
from mlx_mtp.chat.screen import Screen
from mlx_mtp.config import SEED
from mlx_mtp.console import clean, speed_text
from mlx_mtp.errors import UNEXPECTED, BenchError, UsageError
from mlx_mtp.flags import hint

_PROMPT, _MORE = "> ", "  "
_QUOTES = '"""'  # around a message of several lines


@dataclass
class Session:
    """One conversation with a server."""

    client: httpx.Client  # Its base URL ends in /v1.
    console: Console
    model: str
    fields: dict[str, Any]  # added to the body of each request
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)  # parts of the next message

    def talk(self, read: Callable[[str], str]) -> None:
        """Talk until the input ends; `read` shows the prompt it is given and returns a line."""
        while True:
            try:
                text, is_quoted = _read_message(read)
                text.encode()  # In some locales, invalid bytes become lone surrogates.
                if text.startswith("/") and not is_quoted:
                    word, _, argument = text[1:].partition(" ")
                    if word in ("quit", "exit"):
                        return
                    self._command(word, argument.strip())
                elif text.strip():
                    self.ask(text)
            except KeyboardInterrupt:
                self._say("\nCtrl-D or /quit ends the conversation.")
            except UnicodeError:
                self._say("What was typed is not valid UTF-8.")
            except EOFError:
                return

    def ask(self, text: str) -> None:
        """Send a message and show its answer; if there is only an error, remove the message."""
        images, self.images = self.images, []
        content: Any = [*images, {"type": "text", "text": text}] if images else text
        self.messages.append({"role": "user", "content": content})
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": system + self.messages, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self.fields}
        answer, report = "", ""
        reads, began = list[TimedRead](), time.perf_counter()
        try:
            with Screen(self.console) as screen:
                for kind, piece in _pieces(self.client, body, reads):
                    screen.append(piece, reasoning=kind == "reasoning")
                    answer += piece if kind == "content" else ""
            timed = parse_answer(began, reads)
            report = speed_text(
                timed.num_tokens,
                timed.decoding_rate or 0.0,
                timed.prompt_tokens,
                timed.ttft or 0.0,
                timed.num_drafts,
                timed.num_accepted,
            )
        except KeyboardInterrupt:
            report = "[stopped]"
        except (BenchError, UsageError, httpx.HTTPError, *UNEXPECTED) as error:
            report = " ".join(str(error).split()) or repr(error)
            if isinstance(error, UNEXPECTED):
                report = "What came is no chat completion."
            if not answer:
                del self.messages[-1]
                self.images = images
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        self._say(report)

    def _say(self, text: str) -> None:
        self.console.print(clean(text), style="dim", markup=False, highlight=False)

    def _command(self, word: str, argument: str) -> None:
        if word not in COMMANDS:
            self._say(f"There is no /{word}{hint(word, COMMANDS)} (/help lists all).")
            return
        try:
            self._say(COMMANDS[word][1](self, argument))
        except (argparse.ArgumentTypeError, UsageError) as error:
            self._say(str(error))


def _read_message(read: Callable[[str], str]) -> tuple[str, bool]:
    """Returns a message of one or several lines, and True if it was in triple quotes."""
    text = read(_PROMPT)
    if text.lstrip().startswith(_QUOTES):
        text = text.lstrip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            text += f"\n{read(_MORE)}"
        return text.rstrip().removesuffix(_QUOTES).rstrip().lstrip("\n"), True
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{read(_MORE)}"
    return text, False


def served_models(client: httpx.Client) -> list[str]:
    """Returns the names of a server's models; UsageError if it doesn't answer or has none."""
    try:
        response = client.get("/models")
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise UsageError(f"{client.base_url} requires its API key, or refuses it (--api-key).")
        names = [each["id"] for each in response.raise_for_status().json()["data"]]
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a model's id is not a string")
    except (httpx.HTTPError, *UNEXPECTED) as error:
        raise UsageError(
            f"No server with the OpenAI API answers at {client.base_url} ({error})."
        ) from None
    if not names:
        raise UsageError(f"The server at {client.base_url} has no model; load one there.")
    return names


def _pieces(
    client: httpx.Client, body: dict[str, Any], reads: list[TimedRead]
) -> Iterator[tuple[str, str]]:
    """Yields the pieces of an answer: "content" or "reasoning", and the text.

    Appends each read of the stream to `reads`. Raises UsageError if the server refuses the request.
    """
    with client.stream("POST", "/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
            raise UsageError(f"The server answered {response.status_code}: {error_text(response)}")

        def received() -> Iterator[TimedRead]:
            for data in response.iter_bytes():
                reads.append((time.perf_counter(), data))
                yield reads[-1]

        for _, data in timed_events(received()):
            choices = json.loads(data).get("choices") if data != "[DONE]" else ()
            for choice in choices or ():
                for kind, text in delta_texts(choice.get("delta") or {}).items():
                    if text:  # A lone surrogate couldn't be sent back.
                        yield kind, text.encode(errors="replace").decode()


def _set_system(session: Session, text: str) -> str:
    session.system = text or None
    return "The system message is set." if text else "There is no system message now."


def _set_seed(session: Session, text: str) -> str:
    if not text:
        session.fields.pop("seed", None)
        return "Each answer is random again."
    session.fields["seed"] = SEED(text)
    return f"The seed is {text}: the same conversation gives the same answers."


def _set_model(session: Session, text: str) -> str:
    names = served_models(session.client)
    if text and text not in names:
        raise UsageError(f"{text} is not served here; these are: {', '.join(names)}.")
    session.model = text or session.model
    others = [name for name in names if name != session.model]
    return f"The model is {session.model}." + (f" Others: {', '.join(others)}." if others else "")


def _add_image(session: Session, text: str) -> str:
    try:
        (name,) = shlex.split(text)  # Terminals quote the name of a file that is dropped on them.
        path = Path(name).expanduser()
        data = base64.b64encode(path.read_bytes()).decode()
    except ValueError:
        raise UsageError("/image takes the name of one file.") from None
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}.") from None
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    url = {"url": f"data:{kind};base64,{data}"}
    session.images.append({"type": "image_url", "image_url": url})
    return f"{path.name} goes with the next message, image {len(session.images)} of it."


def _clear(session: Session, _: str) -> str:
    session.messages.clear()
    session.images.clear()
    return "The conversation begins anew."


def _help(_: Session, __: str) -> str:
    rows = [(usage, what) for usage, _, what in COMMANDS.values()]
    rows += [("/quit", "end; Ctrl-D does the same"), ("Ctrl-C", "stop the answer")]
    lines = [f"{usage:<16}{what}" for usage, what in rows]
    more = "A line that ends with \\ goes on in the next one, and a text between two"
    return "\n".join([*lines, f"{more} {_QUOTES} may have many lines."])


COMMANDS: dict[str, tuple[str, Callable[[Session, str], str], str]] = {
    "system": ("/system TEXT", _set_system, "set the system message; without TEXT, have none"),
    "seed": ("/seed N", _set_seed, "the same seed gives the same answers; without N, random"),
    "model": ("/model [NAME]", _set_model, "show the server's models, or take another"),
    "image": ("/image FILE", _add_image, "send an image with the next message"),
    "clear": ("/clear", _clear, "begin anew"),
    "help": ("/help", _help, "show this"),
}
