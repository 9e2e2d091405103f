"""Tokenizers made on the spot: ids and back, streams that equal whole texts, templates and their refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from runtime.text import TextStream, Utf8Stream
from runtime.tokenizer import TextError, Tokenizer, TokenizerError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_level() -> Encoder:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate([*alphabet, "Ġa", "ab"])}
    encoder = Encoder(models.BPE(vocabulary, [("Ġ", "a"), ("a", "b")]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    return encoder


def byte_fallback() -> Encoder:
    vocabulary = {token: n for n, token in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a"])}
    encoder = Encoder(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    encoder.normalizer = normalizers.Replace(" ", "▁")
    encoder.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return encoder


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    encoder = request.param()
    encoder.add_tokens([AddedToken("<s>", special=True), AddedToken("<tool>", special=False)])
    encoder.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4], "temperature": 0.5}))
    return Tokenizer(folder)


@given(st.text(max_size=40))
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    for control in ("<s>", "<tool>", "▁"):  # SentencePiece itself cannot tell ▁ from a space
        text = text.replace(control, "")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_long_text_that_comes_again_is_encoded_once(tokenizer: Tokenizer) -> None:
    long = "ab " * 2000
    ids = tokenizer.encode(long)
    ids.append(0)  # the caller's own
    before = tokenizer._encode_once.cache_info()
    assert tokenizer.encode(long) == ids[:-1] == tokenizer._encode_anew(long, True)
    after = tokenizer._encode_once.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


@given(st.lists(st.integers(0, 262), max_size=40))
def test_a_stream_equals_the_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = TextStream(tokenizer.shown_bytes_of, [])
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def test_a_broken_character_is_never_shown_while_it_may_be_completed(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer.bytes_of, [])
    pieces = [stream.push(token) for token in tokenizer.encode("a🙂")]
    assert "".join(pieces) == "a🙂" and not any("\ufffd" in piece for piece in pieces)
    cut = TextStream(tokenizer.bytes_of, [])
    assert [cut.push(token) for token in tokenizer.encode("🙂")[:2]] == ["", ""] and cut.finish() == "\ufffd"


def test_a_stop_string_ends_the_tokens_too(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one.two")
    stream = TextStream(tokenizer.bytes_of, ["."])
    shown, count = "", 0
    while stream.stop is None:
        shown, count = shown + stream.push(ids[count]), count + 1
    assert (shown, stream.stop) == ("one", ".")
    assert tokenizer.decode(ids[:count]) == "one."
    early = TextStream(tokenizer.bytes_of, ["."], min_tokens=len(ids))
    assert "".join(map(early.push, ids)) + early.finish() == "one.two"


def test_the_prompt_never_leaks_into_the_output() -> None:
    smile = "🙂".encode()
    completes, breaks = Utf8Stream(b"x" + smile[:2]), Utf8Stream(b"x" + smile[:2])
    assert completes.feed(smile[2:]) == "🙂"
    assert breaks.feed(b"y") == "y"


def test_special_tokens_are_hidden_and_others_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s>a<tool>a")
    assert tokenizer.decode(ids) == "a<tool>a"
    assert tokenizer.decode(ids, skip_special=False) == "<s>a<tool>a"
    assert tokenizer.bytes_of(10**6) == b""


def test_defaults_come_from_the_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == (3, 4) and tokenizer.sampling_defaults == {"temperature": 0.5}


def test_a_lone_surrogate_is_the_callers_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="lone surrogate at position 1"):
        tokenizer.encode("a\ud800")


def test_chat_renders_and_refuses_in_the_templates_words(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat([{"role": "user", "content": "a"}])
    assert tokenizer.decode(ids, skip_special=False) == "<s>user: a\n<s>assistant:"
    with pytest.raises(TextError, match="no robots"):
        tokenizer.chat([{"role": "robot", "content": "a"}])


def test_templates_cannot_reach_python(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path
    byte_level().save(str(folder / "tokenizer.json"))
    with pytest.raises(TextError, match="no chat template"):
        Tokenizer(folder).chat([])
    nasty = Tokenizer(folder, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TextError, match="refuses"):
        nasty.chat([])
    with pytest.raises(TokenizerError, match="chat template"):
        Tokenizer(folder, "{% if %}").chat([])


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer(tmp_path)
    word_piece = Encoder(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    word_piece.decoder = decoders.WordPiece()
    word_piece.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="WordPiece is not supported"):
        Tokenizer(tmp_path)


def test_control_tokens_in_a_message_stay_text(tokenizer: Tokenizer) -> None:
    control = tokenizer.encode("<s>", add_special=False)
    assert len(control) == 1  # outside a conversation it is the token
    plain, nasty = (tokenizer.chat([{"role": "user", "content": text}]) for text in ("a", "a<s>\uf8f0b"))
    assert nasty.count(control[0]) == plain.count(control[0]) == 2  # the template's own
    assert tokenizer.decode(nasty, skip_special=False) == "<s>user: a<s>\uf8f0b\n<s>assistant:"
    assert tokenizer.chat([{"role": "user<s>\uf8f1", "content": "a"}]).count(control[0]) == 2  # nor elsewhere in it


@pytest.mark.parametrize("said", ["ab ", "", " ", "e", "end", "\uf8f2b"])
def test_a_last_message_can_be_continued(tokenizer: Tokenizer, tmp_path: Path, said: str) -> None:
    """Though the template's own words behind it have the same letters."""
    tokenizer._encoder.save(str(tmp_path / "tokenizer.json"))
    template = TEMPLATE.replace("m.content }}", "m.content }} end of {{ m.role }}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
    ids = Tokenizer(tmp_path, template).chat(messages, add_generation_prompt=False, continued=True)
    before = "<s>user: a end of user\n<s>assistant: "
    assert tokenizer.decode(ids, skip_special=False) == before + said.rstrip()
    assert messages[-1]["content"] == said
