"""`mlx-mtp chat`: what it sends, shows and remembers, and a session in a real terminal."""

import io
import json
import re
import sys

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mlx_mtp.chat.screen import Screen, _markdown_blocks
from mlx_mtp.chat.session import Session, served_models
from mlx_mtp.cli.main import main
from mlx_mtp.errors import UsageError
from tests.support.process import Server
from tests.test_terminal import COLUMNS, terminal

USAGE = {"usage": {"prompt_tokens": 7, "completion_tokens": 4}}
USAGE |= {"timings": {"draft_n": 4, "draft_n_accepted": 3}}


def events(*deltas, ends=True):
    """Returns the stream of an answer."""
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    if ends:
        chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}], **USAGE}]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n" if ends else ""]))


@pytest.fixture
def talk(capsys):
    """Returns a function that runs a conversation without a terminal: what it sent and showed."""

    def talk(*typed, answers=(), **more):
        sent, answers = [], iter(answers)

        def handle(request):
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "one"}, {"id": "two"}]})
            sent.append(json.loads(request.content))
            answer = next(answers)
            if isinstance(answer, type):
                raise answer("no")
            return answer

        lines = iter(typed)

        def read(_):
            line = next(lines, None)
            if line is None:
                raise EOFError
            if line == "^C":
                raise KeyboardInterrupt
            return line.decode() if isinstance(line, bytes) else line

        client = httpx.Client(base_url="http://x/v1", transport=httpx.MockTransport(handle))
        console = Console(file=sys.stdout, width=80)
        session = Session(client, console, served_models(client)[0], {"top_k": 3}, **more)
        session.talk(read)
        shown = capsys.readouterr()
        return sent, shown.out, shown.err, session

    return talk


def test_a_conversation(talk):
    thinking, hello = {"reasoning_content": "Hm.", "reasoning": "Hm."}, {"content": "Hello."}
    sent, out, err, session = talk(
        *("Hi\\", "there", "  ", "/system Be kind", "/seed 5", "/model two", "^C", "And?", "/quit"),
        answers=(events(thinking, hello), events({**thinking, "content": "[b]So."})),
    )
    first, second = sent
    stream = {"stream": True, "stream_options": {"include_usage": True}, "top_k": 3}
    asked = [{"role": "user", "content": "Hi\nthere"}]
    assert first == {"model": "one", "messages": asked, **stream}
    asked += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "And?"}]
    asked.insert(0, {"role": "system", "content": "Be kind"})
    assert second == {"model": "two", "messages": asked, "seed": 5, **stream}
    assert (err, session.messages[-1]["content"]) == ("Hm.Hm.", "[b]So.")
    assert "Hello.\n[4 tokens, " in out and "75% of 4 drafts accepted]" in out
    assert "Ctrl-D or /quit ends" in out and "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_images(talk, tmp_path):
    """Images go with the next message; if it is refused, with the one after it."""
    path = tmp_path / "a cat.png"
    path.write_bytes(b"abc")
    refused = httpx.Response(400, json={"error": {"message": "too large"}})
    sent, out, _, _ = talk(
        *(f"/image '{path}'", "/image", "/image gone.png", "one", "two", "three"),
        answers=(refused, events({"content": "a"}), events({"content": "b"})),
    )
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}}
    asked = [[part, {"type": "text", "text": word}] for word in ("one", "two")]
    assert [body["messages"][-1]["content"] for body in sent] == [*asked, "three"]
    assert "a cat.png goes with the next message" in " ".join(out.split())
    assert "takes the name of one file" in out and "gone.png can't be read" in out


def test_triple_quotes_are_around_a_message_of_many_lines(talk):
    typed = (
        '"""one',
        "",
        " two\\",
        'three"""',
        '"""/system x"""',
        '"""',
        "/quit",
        '  """ ',
        '""""""',
    )
    sent, out, _, session = talk(*typed, "/nope\\", "x", answers=[events({"content": "c"})] * 3)
    asked = [each["content"] for each in sent[-1]["messages"]]
    assert asked == ["one\n\n two\\\nthree", "c", "/system x", "c", "/quit"]
    assert session.system is None and "There is no /nope" in out


def test_what_goes_wrong_is_one_line_and_the_conversation_goes_on(talk):
    refused = httpx.Response(400, json={"error": {"message": "too long"}})
    failed = events({"content": "a"}, ends=False)
    broken = httpx.Response(200, text='data: {"error": {"message": "it broke"}}\n\n')
    strange = httpx.Response(200, text="data: [1]\n\n")
    answers = (
        refused,
        strange,
        failed,
        broken,
        httpx.ReadError,
        KeyboardInterrupt,
        events({"content": "c"}),
    )
    sent, out, _, session = talk(b"\xff", "\udcff", *"1x23456", answers=answers)
    assert out.count("not valid UTF-8") == 2
    for words in ("too long", "no chat completion", "cut off", "it broke", "no\n", "[stopped]"):
        assert words in out
    asked = [each["content"] for each in sent[-1]["messages"]]
    assert asked == ["2", "a", "5", "6"]
    assert session.messages[-1]["content"] == "c"
    empty = httpx.MockTransport(lambda _: httpx.Response(200, json={"data": []}))
    with pytest.raises(UsageError, match="has no model"):
        served_models(httpx.Client(base_url="http://x/v1", transport=empty))


def test_commands(talk):
    typed = ("/hlep", "/seed x", "/seed 3", "/seed", "/system", "/model none", "/model", "/clear")
    _, out, _, session = talk(*typed, "/help")
    words = ("no /hlep; did you mean help?", "'x' is not an integer", "none is not served here")
    for each in (*words, "The model is one. Others: two.", "/system TEXT", "Ctrl-C"):
        assert each in out
    assert session.fields == {"top_k": 3}


@given(st.text("ab \n`-", max_size=60))
def test_blocks_are_all_of_the_text_and_leave_code_whole(text):
    blocks = _markdown_blocks(text)
    assert "".join(blocks) == text
    for block in blocks[:-1]:
        assert block.endswith("\n\n") and block.strip()
        assert sum(line.lstrip().startswith("```") for line in block.splitlines()) % 2 == 0


def test_markdown_and_dimmed_reasoning():
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system="standard")
    with Screen(console) as screen:
        for piece in ("Let me", " think.\n\nYes."):
            screen.append(piece, reasoning=True)
        for piece in ("A **bo", "ld** word.\n\n```\nx = 1\n\ny = 2\n```\n\n* on", "e\n"):
            screen.append(piece, reasoning=False)
    shown = console.file.getvalue()
    for words in ("\x1b[2mLet me think.", "\x1b[2mYes.", "A \x1b[1mbold\x1b[0m word.", " • "):
        assert words in shown
    assert "**" not in shown.replace("A **bo", "")


def test_with_a_server_the_flags_of_a_model_are_refused(mtp_server: Server, capsys, monkeypatch):
    assert main(["chat", mtp_server.url, "--dtype", "float32"], {}) == 2
    assert "--dtype is for a model that is loaded here" in capsys.readouterr().err
    for nowhere in ("http://127.0.0.1:1", "127.0.0.1:1", "localhost:1/v1", "[::1]:1"):
        assert main(["chat", nowhere], {}) == 2
        assert "No server with the OpenAI API answers" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me a story.\n"))
    assert main(["chat", "--model", mtp_server.url, "--max-tokens", "9"], {}) == 0
    assert "[9 tokens, " in capsys.readouterr().out


LIBEDIT = """
import readline
readline.__doc__ = "libedit"
from mlx_mtp.chat.command import _reader
read = _reader()
print([read("> "), read("> ")])
"""


def test_pasted_lines_are_one_message_with_libedit_too():
    """libedit has no bracketed paste."""
    with terminal("-c", LIBEDIT) as shown:
        shown.wait_for("> ")
        shown.type("one\n\ntwo\nthree", "three")
        shown.type(" and more\n", "more\n> ")
        assert "['one\\n\\ntwo\\nthree and more', 'four']" in shown.type("four\n", "]")


def test_in_a_terminal_with_its_own_engine():
    """A chat is typed, stopped by Ctrl-C and ended by Ctrl-D, at 80 columns."""
    with terminal("chat", "--temperature", "0", "--seed", "1") as shown:
        shown.wait_for("> ")
        # On a first start nothing is drafted before the cost of a step has been measured.
        answer = shown.type("Tell me a story.\n", r"(accepted|no drafts)\]\n> ")
        assert " tokens, " in answer
        # Pasted text is one message, and so is text between triple quotes.
        for typed in ("\x1b[200~Tell me\ra joke.\x1b[201~\n", '"""\nTell me\n\na joke.\n"""\n'):
            assert shown.type(typed, r"(accepted|no drafts)\]\n> ").count(" tokens, ") == 1
        assert " tokens, " not in shown.type("/seed 5\n", "The seed is 5")
        shown.type("Write a long story about a brave fox.\n", r"fox\.\s+\w")  # the answer has begun
        assert "[stopped]" in shown.type("\x03", "\n> ")
        shown.type("\x04", "")
        shown.read_all()
        assert shown.process.returncode == 0
    # A redrawn line begins with a carriage return.
    assert max(map(len, re.split(r"[\r\n]+", answer))) <= COLUMNS
