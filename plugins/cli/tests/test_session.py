"""A conversation with its commands, without a terminal and without a model."""

from __future__ import annotations

import json

import pytest
from toolkit_lm.config import PluginsConfig
from toolkit_lm.errors import ContextLengthError, RequestError
from toolkit_lm.plugin import Plugins
from toolkit_lm_cli.conversation import Conversation
from toolkit_lm_cli.sampling import SamplingFlags
from toolkit_lm_cli.screen import Shown
from toolkit_lm_cli.session import COMMANDS, ChatSession
from toolkit_lm_cli.talker import Usage


class Fake:
    """A model that answers with the number of messages and the question."""

    usage = Usage(10, 4)

    def __init__(self):
        self.asked = []
        self.closed = 0

    def facts(self):
        return {"model": "fake", "dtype": "float32", "context": "100 tokens"}

    def max_model_len(self):
        return 100

    def chat(self, messages, flags):
        self.asked.append((messages, dict(flags)))
        text = messages[-1]["content"]
        text = text if isinstance(text, str) else text[-1]["text"]
        if text == "long" and len(messages) > 1:
            raise ContextLengthError("too long.")
        if text == "refuse":
            raise RequestError("no.")
        return self._stream(f"{len(messages)}: {text}")

    def _stream(self, text):
        try:
            yield from text.split(" ")
        finally:
            self.closed += 1


class Screen:
    def __init__(self):
        self.notes = []
        self.stop = False

    def show(self, stream):
        if self.stop:
            text = next(stream)
            stream.close()
            return Shown(text, False)
        return Shown(" ".join(stream), True)

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def session():
    processors = Plugins.load(PluginsConfig(plugins=["cli"])).logits_processors
    return ChatSession(Fake(), Conversation("Be brief."), SamplingFlags(processors), Screen())


def said(session):
    return [(message["role"], message["content"]) for message in session.conversation.messages]


def test_messages_are_kept_and_figures_told(session):
    session.run(["one", "two"])
    assert said(session)[1:] == [
        ("user", "one"),
        ("assistant", "2: one"),
        ("user", "two"),
        ("assistant", "4: two"),
    ]
    assert session.screen.notes[-1].startswith("4 tokens, ") and session.screen.notes[-1].endswith(
        ", 14 of 100 in context"
    )
    assert "tokens/s" in session.screen.notes[-1]
    session.handle("/tokens")
    assert session.screen.notes[-1] == session.screen.notes[-2]
    assert session.banner().startswith("fake · float32 · 100 tokens\n/help")


def test_undo_retry_and_clear(session):
    session.run(["one", "two", "/undo"])
    assert session.screen.notes[-1] == "taken back: two"
    session.handle("/retry")
    assert said(session)[1:] == [("user", "one"), ("assistant", "2: one")]
    assert len(session.talker.asked) == 3
    session.run(["/clear", "/undo", "/retry"])
    assert session.screen.notes[-2:] == ["error: nothing was asked so far."] * 2
    assert said(session) == [("system", "Be brief.")]


def test_what_was_stopped_is_kept_as_far_as_it_came(session):
    session.screen.stop = True
    session.handle("one")
    assert said(session)[1:] == [("user", "one"), ("assistant", "2:")]
    assert session.screen.notes[-1].startswith("stopped; ") and session.talker.closed == 1


def test_an_answer_that_fails_anew_leaves_the_one_before(session, monkeypatch):
    session.handle("one")
    before = said(session)

    def fail(*_):
        raise RequestError("no.")

    monkeypatch.setattr(session.talker, "chat", fail)
    session.handle("/retry")
    assert (said(session), session.screen.notes[-1]) == (before, "error: no.")


def test_a_refused_message_is_not_kept(session):
    session.run(["refuse", "one"])
    assert said(session)[1:] == [("user", "one"), ("assistant", "2: one")]


def test_what_no_longer_fits_begins_anew(session):
    session.conversation.system = None
    session.run(["one", "long"])
    assert said(session) == [("user", "long"), ("assistant", "1: long")]
    assert "What was said before is forgotten" in session.screen.notes[-2]


def test_the_system_message_is_set_shown_and_taken_away(session):
    session.run(["/system", "/system Be long.", "one", "/system none", "two"])
    assert session.screen.notes[0] == "system message: Be brief."
    assert [messages[0] for messages, _ in session.talker.asked] == [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "one"},
    ]


def test_sampling_parameters_are_set_and_checked(session):
    session.run(["/set temperature=0.5 --top-k=3 stop='a b'", "one"])
    assert session.talker.asked[-1][1] == {"temperature": 0.5, "top_k": 3, "stop": ["a b"]}
    session.handle("/set temperature= top_k=4")
    assert session.flags == {"top_k": 4, "stop": ["a b"]}
    for words, why in (
        ("temperatur=1", "Did you mean 'temperature'"),
        ("temperature=hot", "must be a number, not 'hot'"),
        ("top_p=2", "--top-p must be"),
        ("n=2", "n must be 1"),
        ("temperature", "write /set NAME=VALUE"),
        ("stop='a", "quotation mark"),
    ):
        session.handle(f"/set {words}")
        assert why in session.screen.notes[-1]
        assert session.flags == {"top_k": 4, "stop": ["a b"]}
    session.run(["/set top_k= stop=", "/set"])
    assert session.screen.notes[-1] == "all sampling parameters are the model's."


def test_a_conversation_is_saved_and_loaded(session, tmp_path):
    path = tmp_path / "a b.json"
    session.run(["one", f"/save {path}", "/clear", "/system none", f"/load {path}", "two"])
    assert said(session) == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "2: one"),
        ("user", "two"),
        ("assistant", "4: two"),
    ]
    session.handle(f"/save {path}")
    assert session.screen.notes[-1].endswith("is there already: /save! replaces it.")
    session.handle(f"/save! {path}")
    assert len(json.loads(path.read_text())["messages"]) == 5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a saved conversation"),
        ("[" * 10_000, "not a saved conversation"),
        ('{"a": 1}', "not a saved conversation"),
        ('[{"role": "root", "content": "a"}]', "Invalid enum value 'root'"),
        ('[{"role": "user", "content": 3}]', "must be text or a list or none"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(session, tmp_path, text, why):
    path = tmp_path / "file.json"
    path.write_text(text)
    session.run(["one", f"/load {path}"])
    assert why in session.screen.notes[-1]
    assert said(session)[1:] == [("user", "one"), ("assistant", "2: one")]
    session.run([f"/load {tmp_path / 'none'}", "/load", f"/save {tmp_path}"])
    assert "cannot be read" in session.screen.notes[-3]
    assert session.screen.notes[-2] == "error: name a file."
    assert session.screen.notes[-1].startswith("error: ")


def test_an_image_goes_with_the_next_message_and_with_it_anew(session, tmp_path):
    (tmp_path / "a.png").write_bytes(b"abc")
    session.run([f"/image {tmp_path / 'a.png'}", "what?", "/retry", "and?"])
    kinds = [
        [part["type"] for part in messages[-1]["content"]]
        for messages, _ in session.talker.asked[:2]
    ]
    assert kinds == [["image_url", "text"]] * 2
    assert session.talker.asked[2][0][-1]["content"] == "and?"
    session.handle(f"/image {tmp_path / 'none.png'}")
    assert "cannot be read" in session.screen.notes[-1]


def test_a_recording_goes_with_the_next_message(session, tmp_path):
    for name in ("a.png", "b.flac"):
        (tmp_path / name).write_bytes(b"abc")
    session.run([f"/image {tmp_path / 'a.png'}", f"/audio {tmp_path / 'b.flac'}", "what?", "and?"])
    asked = session.talker.asked[0][0][-1]["content"]
    assert asked[1:] == [
        {"type": "input_audio", "input_audio": {"data": "YWJj", "format": "flac"}},
        {"type": "text", "text": "what?"},
    ]
    assert session.talker.asked[1][0][-1]["content"] == "and?"
    assert "2 file(s) go with the next message." in session.screen.notes
    session.handle(f"/audio {tmp_path / 'none.wav'}")
    assert "cannot be read" in session.screen.notes[-1]


def test_help_unknown_commands_and_the_end(session):
    session.run(["/help", "/retri", "//etc/passwd", "/exit", "never"])
    assert all(f"/{name}" in session.screen.notes[0] for name in COMMANDS)
    assert "there is no command /retri. Did you mean 'retry'?" in session.screen.notes[1]
    assert [messages[-1]["content"] for messages, _ in session.talker.asked] == ["/etc/passwd"]
